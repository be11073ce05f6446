"""Random runs of synchronous replicas, for a session and for the numpy model alike.

A run trains the model of `tests.models`; replicas sit out, compute gradients that are not finite,
or lag.
"""

from __future__ import annotations

from typing import Callable, Iterator, NamedTuple, Sequence

import numpy as np
from hypothesis import strategies as st

from tests import models, reference
from tests.optimizers.sync_replicas.sync_replicas_reference import SyncReplicas

VARIABLES = tuple(models.mlp_values())
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))


class Schedule(NamedTuple):
    """What goes wrong in a run.

    Attributes:
      shard_sizes: number of shards along each batch dimension, as for `models.batch_shape`;
        replicas count through them in row-major order.
      replicas_to_aggregate: contributions that an update needs.
      steps: number of steps.
      sits_out: (step, replica) of those that the caller masks out.
      poison: (step, replica, variable, value): what is added to every entry of a gradient.
      bad_data: (step, replica, value): a target in a replica's part of the batch.
      lags: (step, replica, by): how far a local step is set back before a step.
      seed: of the batches.
    """

    shard_sizes: tuple[int, ...]
    replicas_to_aggregate: int
    steps: int
    sits_out: tuple[tuple[int, int], ...] = ()
    poison: tuple[tuple[int, int, str, float], ...] = ()
    bad_data: tuple[tuple[int, int, float], ...] = ()
    lags: tuple[tuple[int, int, int], ...] = ()
    seed: int = 1

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return int(np.prod(self.shard_sizes))

    def feeds(self) -> list[dict[str, np.ndarray]]:
        """Inputs of each step.

        Returns:
          for each step a dictionary of "x" and "y" (as `models.mlp_batches`), "contributes" (bool,
          [num_replicas]), "lag" (int32, [num_replicas], to subtract from the local steps before
          the step) and for each variable "poison_<variable>" (float32, [num_replicas], 0 or not
          finite, to add to every entry of the replicas' gradients).
        """
        feeds = models.mlp_batches(self.steps, self.seed)
        for feed in feeds:
            feed["contributes"] = np.ones(self.num_replicas, bool)
            feed["lag"] = np.zeros(self.num_replicas, np.int32)
            for name in VARIABLES:
                feed[f"poison_{name}"] = np.zeros(self.num_replicas, np.float32)
        for step, replica in self.sits_out:
            feeds[step]["contributes"][replica] = False
        for step, replica, by in self.lags:
            feeds[step]["lag"][replica] = by
        for step, replica, name, value in self.poison:
            feeds[step][f"poison_{name}"][replica] = value
        rows = parts(np.arange(models.BATCH), self.shard_sizes)
        for step, replica, value in self.bad_data:
            feeds[step]["y"][rows[replica][0], 0] = value
        return feeds


class State(NamedTuple):
    """What must agree after a step, as in `SyncReplicas`.

    Attributes:
      applied: whether the step made an update.
      steps: [num_replicas], the update step that each replica's gradient of the step was for.
    """

    applied: bool
    steps: np.ndarray
    values: reference.Values
    averages: reference.Values
    sums: reference.Values
    local_step: np.ndarray
    global_step: int
    count: int
    made: np.ndarray
    dropped: np.ndarray


def parts(batch: np.ndarray, shard_sizes: Sequence[int]) -> list[np.ndarray]:
    """Every replica's part of a batch, whose first dimension is `models.batch_shape`, flattened."""
    if len(shard_sizes) == 1:
        return np.split(batch, shard_sizes[0])
    outer, inner = (d.size for d in models.batch_shape(["outer", "inner"]))
    grid = batch.reshape(outer, inner, *batch.shape[1:])
    return [
        part.reshape(-1, *batch.shape[1:])
        for row in np.split(grid, shard_sizes[0], 0)
        for part in np.split(row, shard_sizes[1], 1)
    ]


def grads_by_replica(
    values: reference.Values, feed: dict[str, np.ndarray], shard_sizes: Sequence[int]
) -> list[reference.Values]:
    """Every replica's gradients: of the mean loss over its part of the batch, plus its poison."""
    x, y = (parts(feed[k].astype(np.float64), shard_sizes) for k in ("x", "y"))
    with np.errstate(invalid="ignore"):
        return [
            {k: g + feed[f"poison_{k}"][i] for k, g in reference.mlp_grads(values, *xy).items()}
            for i, xy in enumerate(zip(x, y))
        ]


def replay(
    schedule: Schedule,
    update: Callable[[reference.Values, reference.Values], reference.Values],
    average_decay: float | None = None,
) -> Iterator[State]:
    """The state after each step of the numpy model."""
    model = SyncReplicas(
        update,
        schedule.num_replicas,
        schedule.replicas_to_aggregate,
        models.mlp_values(),
        average_decay,
    )
    for feed in schedule.feeds():
        model.local_step -= feed["lag"]
        steps = model.local_step.copy()
        grads = grads_by_replica(model.values, feed, schedule.shard_sizes)
        applied = model.step(grads, feed["contributes"])
        yield State(
            applied,
            steps,
            dict(model.values),
            dict(model.averages),
            dict(model.sums),
            model.local_step.copy(),
            model.global_step,
            model.count,
            model.made.copy(),
            model.dropped.copy(),
        )


@st.composite
def schedules(
    draw: st.DrawFn,
    shard_sizes: Sequence[int],
    replicas_to_aggregate: int | None = None,
    max_steps: int = 8,
    with_poison: bool = True,
) -> Schedule:
    """Schedules for a mesh; what goes wrong is at most about half of what there is.

    Args:
      draw: given by hypothesis.
      shard_sizes: as in `Schedule`.
      replicas_to_aggregate: fixed, for one graph that many schedules run in; otherwise fewer than
        there are replicas, as many, or up to twice as many.
      max_steps: largest number of steps.
      with_poison: whether single variables' gradients may be poisoned; data may be bad in any case.

    Returns:
      a strategy for `Schedule`.
    """
    number = int(np.prod(shard_sizes))
    if replicas_to_aggregate is None:
        kinds = [st.just(number), st.integers(number + 1, 2 * number)]
        if number > 1:
            kinds.append(st.integers(1, number - 1))
        replicas_to_aggregate = draw(st.one_of(kinds))
    steps = draw(st.integers(1, max_steps))
    step, replica = st.integers(0, steps - 1), st.integers(0, number - 1)
    out = draw(st.lists(st.sets(replica), min_size=steps, max_size=steps))
    poison = st.tuples(step, replica, st.sampled_from(VARIABLES), st.sampled_from(NOT_FINITE))
    bad_data = st.tuples(step, replica, st.sampled_from(NOT_FINITE))
    lag = st.tuples(step, replica, st.integers(1, 3))
    most = number if with_poison else 0
    return Schedule(
        tuple(shard_sizes),
        replicas_to_aggregate,
        steps,
        tuple((i, r) for i, replicas in enumerate(out) for r in sorted(replicas)),
        tuple(draw(st.lists(poison, max_size=most, unique_by=lambda p: p[:3]))),
        tuple(draw(st.lists(bad_data, max_size=number // 2, unique_by=lambda p: p[:2]))),
        tuple(draw(st.lists(lag, max_size=number, unique_by=lambda p: p[:2]))),
        draw(st.integers(1, 100)),
    )
