"""SyncReplicasOptimizer on random schedules: all of its state, at every step, is the model's."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings

from tests import reference
from tests.properties.sync_replicas_program import (
    ADAM_EPSILON,
    AVERAGE_DECAY,
    Setup,
    program,
)
from tests.properties.sync_replicas_schedules import Schedule, replay, schedules

MAX_STEPS = 8
# Every step adds a few float32 roundings of numbers of about 1; gradients, sums and slots are of
# that size or less, and so are the derivatives of an update by them. What is larger is scaled.
TOLERANCE = MAX_STEPS * 4 * np.finfo(np.float32).eps

# Fewer contributions than replicas, as many, and more; every optimizer that has slots.
SETUPS = [
    Setup("placement", "4", 3, "momentum", pending=False),
    Setup("placement", "2x2", 2, "adafactor", pending=True),
    pytest.param(Setup("simd", "2x2x2", 4, "adam", pending=False), marks=pytest.mark.slow),
    Setup("simd", "4", 6, "momentum", pending=True),
]


MODELS = {
    "momentum": reference.Momentum,
    "adam": functools.partial(reference.Adam, epsilon=ADAM_EPSILON),
    "adafactor": reference.Adafactor,
}


def slots(optimizer, values):
    """The reference optimizer's state under Mesh-TF's names; zero before the first update."""
    found = {}
    for k, value in values.items():
        zero = np.zeros_like(value)
        if isinstance(optimizer, reference.Momentum):
            found[f"{k}_momentum_v"] = optimizer.v.get(k, zero)
        elif isinstance(optimizer, reference.Adam):
            found[f"{k}/adam_m"] = optimizer.m.get(k, zero)
            found[f"{k}/adam_v"] = optimizer.v.get(k, zero)
        elif value.ndim == 2:
            row, column = optimizer.state.get(k, [zero[0], zero[:, 0]])
            found.update({f"{k}_slot_vr": column, f"{k}_slot_vc": row})
        else:
            found[f"{k}_slot_v"] = optimizer.state.get(k, [zero])[0]
    return found


def check(found, state, optimizer, waiting, missed, share=1):
    """Compares all variables of a program with the model.

    waiting and missed are how long nothing came, in all and by replica; share is what part of a
    replica's gradient the accumulators hold.
    """
    found = dict(found)
    sums = {k: found.pop(f"{k}/gradient_accumulator") for k in state.values}
    for k, expected in state.sums.items():
        total = sums[k].reshape(-1, *expected.shape).sum(0)
        close(total, expected * share, f"accumulator of {k}")
        assert np.any(sums[k]) == (state.count > 0), k
    integers = {
        "local_step": state.local_step,
        "made": state.made,
        "dropped": state.dropped,
        "count": state.count,
        "update_step": state.global_step,
        "waiting": waiting,
        "missed": missed,
    }
    assert found.pop("global_step") == state.global_step
    for k, expected in integers.items():
        actual = found.pop(f"sync_replicas/{k}")
        np.testing.assert_array_equal(actual.reshape(np.shape(expected)), expected, err_msg=k)
    expected = {
        **state.values,
        **{f"{k}/ExponentialMovingAverage": x for k, x in state.averages.items()},
        **slots(optimizer, state.values),
    }
    assert sorted(found) == sorted(expected)
    for k, value in expected.items():
        close(found[k], value, k)


def close(actual, expected, name):
    scale = max(1.0, np.max(np.abs(expected)))
    np.testing.assert_allclose(
        actual, expected, rtol=TOLERANCE, atol=TOLERANCE * scale, err_msg=name
    )


def check_run(run, setup, schedule):
    optimizer = MODELS[setup.optimizer]()
    model = replay(schedule, optimizer, AVERAGE_DECAY)
    # Gradients are those of the mean over all replicas.
    share = 1 / schedule.num_replicas
    waiting, missed, dropped, before = 0, 0, 0, None
    for found, state in zip(run(schedule), model):
        waiting = 0 if state.applied else waiting + 1
        missed = np.where(state.dropped > dropped, missed + 1, 0)
        check(found, state, optimizer, waiting, missed, share)
        dropped = state.dropped
        if before is not None and not state.applied:
            still = [k for k in found if "sync_replicas/" not in k and "accumulator" not in k]
            for k in still:
                # Nothing but counts and sums has moved by a single bit.
                np.testing.assert_array_equal(found[k], before[k], err_msg=k)
        before = found


# By the contributions that an update needs; random ones are of the same programs.
KNOWN = {
    2: [{"steps": 4, "sits_out": ((0, 1), (0, 2), (0, 3), (1, 2), (2, 0), (2, 1), (2, 2))}],
    3: [
        {"steps": 4, "sits_out": ((0, 1), (2, 3))},
        {"steps": 4, "poison": ((0, 2, "w1", float("nan")), (2, 0, "scale", float("inf")))},
    ],
    4: [{"steps": 3}, {"steps": 5, "lags": ((1, 2, 1),), "sits_out": ((1, 0),)}],
    6: [{"steps": 5, "sits_out": ((1, 0),)}],
}


def known_of(setup):
    """Replicas that wait, back up each other, are carried over, not finite, or stale."""
    if np.prod(setup.shard_sizes) == 4:
        for known in KNOWN[setup.replicas_to_aggregate]:
            yield Schedule(setup.shard_sizes, setup.replicas_to_aggregate, **known)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: f"{s.kind}-{s.mesh}")
@pytest.mark.mostly_slow(keep="simd-4")
def test_all_state_is_the_models_at_every_step(setup):
    random = schedules(
        setup.shard_sizes, setup.replicas_to_aggregate, MAX_STEPS, with_poison=not setup.pending
    )
    with program(setup) as run:
        for schedule in known_of(setup):
            check_run(run, setup, schedule)

        @settings(max_examples=4)
        @given(random)
        def agrees(schedule):
            check_run(run, setup, schedule)

        agrees()


OUT = [(0, 2), (2, 0), (2, 1)]
WAYS = {
    "masked": {"sits_out": tuple(OUT)},
    "NaN in one variable": {"poison": tuple((i, k, "b1", float("nan")) for i, k in OUT)},
    "infinity in a scalar": {"poison": tuple((i, k, "scale", float("-inf")) for i, k in OUT)},
    "infinity in the data": {"bad_data": tuple((i, k, float("inf")) for i, k in OUT)},
    "stale": {"lags": tuple((i, k, 1) for i, k in OUT)},
}


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.slow
def test_a_replica_that_is_skipped_costs_nothing_to_the_others(kind):
    setup = Setup(kind, "4", 2, "adafactor", pending=False)
    masked = Schedule(setup.shard_sizes, 2, 4, **WAYS["masked"])
    with program(setup) as run:
        for schedule in known_of(setup):
            check_run(run, setup, schedule)
        for way, kwargs in WAYS.items():
            optimizer = MODELS[setup.optimizer]()
            # The model always sees the mask: it has no NaN, no infinity, no old step.
            model = list(replay(masked, optimizer, AVERAGE_DECAY))
            *_, found = run(Schedule(setup.shard_sizes, 2, 4, **kwargs))
            check(found, model[-1], optimizer, waiting=0, missed=[0] * 4)
            # An update a step, so that a lag lasts for a step too.
            assert [state.count for state in model] == [0] * 4
            assert list(model[-1].made) == [3, 3, 3, 4], way
