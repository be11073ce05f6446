"""The numpy model of synchronous replicas, by cases worked out by hand and by what must hold."""

import numpy as np
import pytest

from tests import models, reference
from tests.optimizers.sync_replicas.sync_replicas_reference import SyncReplicas
from tests.properties.sync_replicas_schedules import (
    Schedule,
    parts,
    replay,
)


def quadratic(num_replicas=3, replicas_to_aggregate=3, **kwargs):
    start = {"x": np.array([10.0, -10.0])}
    return SyncReplicas(reference.Sgd(0.5), num_replicas, replicas_to_aggregate, start, **kwargs)


def gradients(model):
    """Replica k's loss is |x - [k + 1, -2k]|^2 / 2."""
    return [{"x": model.values["x"] - [k + 1, -2 * k]} for k in range(model.num_replicas)]


def state(model):
    return (
        list(model.values["x"]),
        list(model.local_step),
        model.global_step,
        model.count,
        list(model.made),
        list(model.dropped),
    )


# With every replica x goes half of the way to [2, -2], with the first two to [1.5, -1].
ALL_OF_THREE = [[10, -10], [6, -6], [4, -4], [3, -3], [2.5, -2.5], [2.25, -2.25]]
TWO_OF_THREE = [[10, -10], [5.75, -5.5], [3.625, -3.25], [2.5625, -2.125]]


@pytest.mark.parametrize(
    ("replicas_to_aggregate", "contributes", "expected"),
    [
        (3, None, ALL_OF_THREE),
        (1, None, ALL_OF_THREE),
        (2, [True, True, False], TWO_OF_THREE),
    ],
    ids=["all", "more than asked", "one backup"],
)
def test_update_averages_over_contributions(replicas_to_aggregate, contributes, expected):
    model = quadratic(3, replicas_to_aggregate)
    assert list(model.values["x"]) == expected[0]
    for x in expected[1:]:
        assert model.step(gradients(model), contributes)
        assert list(model.values["x"]) == x


def test_contributions_carry_over_until_there_are_enough():
    model = quadratic(2, 3)
    assert not model.step(gradients(model))
    assert state(model) == ([10, -10], [0, 0], 0, 2, [1, 1], [0, 0])
    assert list(model.sums["x"]) == [17, -18]
    assert model.step(gradients(model))
    # Four contributions came, and all of them count.
    assert state(model) == ([5.75, -5.5], [1, 1], 1, 0, [2, 2], [0, 0])
    assert list(model.sums["x"]) == [0, 0]


def test_stale_gradients_are_dropped_until_the_next_token():
    model = quadratic()
    assert model.step(gradients(model))
    model.local_step[2] -= 1
    assert not model.step(gradients(model))
    assert state(model) == ([6, -6], [1, 1, 0], 1, 2, [2, 2, 1], [0, 0, 1])
    assert model.step(gradients(model))
    assert state(model) == ([3.75, -3.5], [2, 2, 2], 2, 0, [3, 3, 1], [0, 0, 2])
    assert model.step(gradients(model))
    assert state(model) == ([2.875, -2.75], [3, 3, 3], 3, 0, [4, 4, 2], [0, 0, 2])


def test_nobody_contributes_and_all_stand_still():
    model = quadratic(average_decay=0.75)
    assert not model.step(gradients(model), [False] * 3)
    assert state(model) == ([10, -10], [0, 0, 0], 0, 0, [0, 0, 0], [1, 1, 1])
    assert list(model.averages["x"]) == [10, -10]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_bad_entry_keeps_a_whole_replica_out(value):
    model = SyncReplicas(reference.Sgd(0.5), 2, 1, {"a": np.zeros(2), "b": np.zeros(2)})
    assert model.step([{"a": np.ones(2), "b": np.ones(2)}, {"a": np.ones(2), "b": [3, value]}])
    assert [list(model.values[k]) for k in "ab"] == [[-0.5, -0.5], [-0.5, -0.5]]
    assert (list(model.made), list(model.dropped)) == ([1, 0], [0, 1])


def test_averages_follow_updates_only():
    model = quadratic(average_decay=0.75)
    seen = [list(model.averages["x"])]
    for contributes in (None, [True, False, False], None):
        model.step(gradients(model), contributes)
        seen.append(list(model.averages["x"]))
    # The third step averages over four: x goes from 6 half of the way to (2 * 3 + 1) / 4.
    assert list(model.values["x"]) == [3.875, -3.75]
    assert seen == [[10, -10], [9, -9], [9, -9], [7.71875, -7.6875]]


@pytest.mark.parametrize("shard_sizes", [(8,), (2, 2)])
@pytest.mark.parametrize("optimizer", sorted(reference.OPTIMIZERS))
def test_when_nothing_goes_wrong_it_trains_on_whole_batches(optimizer, shard_sizes):
    schedule = Schedule(shard_sizes, int(np.prod(shard_sizes)), steps=3)
    *_, last = replay(schedule, reference.OPTIMIZERS[optimizer]())
    expected = reference.train(optimizer, models.mlp_batches(3, schedule.seed))
    # float64 and a handful of sums in another order; Adafactor divides by small numbers.
    reference.assert_close(last.values, expected, 1e-10, 1e-12)


def test_parts_are_blocks_of_the_batch_dimensions():
    batch = np.arange(models.BATCH)[:, None] * np.ones(2)
    assert [list(p[:, 0]) for p in parts(batch, (2, 2))] == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
        [8, 9, 12, 13],
        [10, 11, 14, 15],
    ]
    assert [list(p[:, 0]) for p in parts(batch, (8,))] == [[2 * i, 2 * i + 1] for i in range(8)]
