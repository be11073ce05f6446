"""Updates that do not come any more: what notices it, its error, how a program learns of it."""

from __future__ import annotations

from typing import Any, Iterable, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.optimizers.sync_replicas.replica_state import ReplicaState, shared_value


class NoUpdateError(RuntimeError):
    """More than max_steps_without_update steps in a row brought no update.

    Attributes:
      limit: max_steps_without_update.
      replicas: numbers of the replicas (shards, row by row) that did not contribute in the last
        step.
    """

    def __init__(self, limit: int, replicas: Iterable[int]):
        self.limit = limit
        self.replicas: list[int] = [int(replica) for replica in replicas]
        super().__init__(limit, self.replicas)

    def __str__(self) -> str:
        return f"{_beginning(self.limit)} {self.replicas}."


def _beginning(limit: int) -> str:
    """What the error says before it names replicas."""
    return (
        f"No update for more than max_steps_without_update={limit} steps. These replicas (shards, "
        "row by row) did not contribute in the last step:"
    )


class StepsWithoutUpdate(mtf.Operation):
    """Sees to it that not too many steps go by without an update.

    On a placement mesh the step fails, after all of its writes. A TPU program cannot fail by
    itself: there a `Watch` looks at the variables, which the session hook does.

    Attributes:
      limit: the largest number of steps in a row without an update.
      takes_a_hook: whether it was lowered where steps do not fail by themselves.
    """

    def __init__(
        self, state: ReplicaState, now: ReplicaState, step: Sequence[mtf.Operation], limit: int
    ):
        """Checks a step.

        Args:
          state: the variables.
          now: their values after the step.
          step: operations of the step, lowered before this one, which it waits for.
          limit: the largest number of steps in a row without an update.
        """
        super().__init__([now.waiting, now.missed], name="max_steps_without_update")
        self.limit = limit
        self.takes_a_hook = False
        self._state = state
        self._step = list(step)
        # Of each lowering, a slice of the variables `waiting` and `missed`.
        self._slices: list[tuple[Any, Any]] = []

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        variables = (lowering.variables[v] for v in (self._state.waiting, self._state.missed))
        waiting, missed = (v.laid_out_tensor.all_slices[0] for v in variables)
        self._slices.append((waiting, missed))
        if is_simd(lowering.mesh_impl(self)):
            self.takes_a_hook = True
            lowering.operations[self] = tf.no_op()
            return
        waiting, missed = (shared_value(lowering, x) for x in self.inputs)
        # A step that fails is a whole step: what it has added to accumulators is counted.
        with tf.control_dependencies([lowering.operations[op] for op in self._step]):
            absent = tf.where_v2(tf.greater(tf.reshape(missed, [-1]), 0))
            lowering.operations[self] = tf.Assert(
                tf.less_equal(waiting, self.limit),
                [_beginning(self.limit), tf.reshape(absent, [-1])],
                summarize=1000,
            )

    def watch(self) -> Watch:
        """Adds to the default graph what tells an error by this check from others.

        Returns:
          What to ask after a step.
        """
        return Watch(self.limit, [(w.read_value(), m.read_value()) for w, m in self._slices])


class Watch:
    """Tells of a session whether its last step has waited too long for an update.

    Made by `StepsWithoutUpdate.watch`, while operations can still be added.
    """

    def __init__(self, limit: int, reads: Sequence[tuple[tf.Tensor, tf.Tensor]]):
        """Remembers what to read.

        Args:
          limit: the largest number of steps in a row without an update.
          reads: for each lowering `waiting`, a scalar, and `missed`, one number for each replica.
        """
        self._limit = limit
        self._reads = list(reads)

    def error(self, session: Any) -> NoUpdateError | None:
        """What to raise after a step, or in place of the error that it failed with; or None.

        Args:
          session: what ran the step, a tf.Session or a session of `mtf_gradsync.simd`.
        """
        for waiting, missed in session.run(self._reads):
            if waiting > self._limit:
                return NoUpdateError(self._limit, np.flatnonzero(np.reshape(missed, -1)))
        return None
