"""The check of max_steps_without_update, and its error."""

from __future__ import annotations

from typing import Any, Iterable, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.sync_replicas.replica_state import ReplicaState, shared_value
from mtf_gradsync.step import Watched


class NoUpdateError(RuntimeError):
    """More than max_steps_without_update steps in a row had no update.

    Attributes:
      limit: max_steps_without_update.
      replicas: the replicas (shards, row by row) that did not contribute in the last step.
    """

    def __init__(self, limit: int, replicas: Iterable[int]):
        self.limit = limit
        self.replicas: list[int] = [int(replica) for replica in replicas]
        super().__init__(limit, self.replicas)

    def __str__(self) -> str:
        return f"{_beginning(self.limit)} {self.replicas}."


def _beginning(limit: int) -> str:
    return (
        f"No update for more than max_steps_without_update={limit} steps. These replicas (shards, "
        "row by row) did not contribute in the last step:"
    )


class StepsWithoutUpdate(Watched):
    """Raises `NoUpdateError` after too many steps without an update.

    On a placement mesh the step fails, after all of its writes; elsewhere the hook raises.
    """

    def __init__(
        self, state: ReplicaState, now: ReplicaState, step: Sequence[mtf.Operation], limit: int
    ):
        """Checks the values `now` of the variables, after the operations of the step."""
        variables = [state.waiting, state.missed]
        super().__init__([now.waiting, now.missed], variables, "max_steps_without_update")
        self._limit, self._step = limit, list(step)

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        self.note_lowering(lowering)
        if self.takes_a_hook:
            lowering.operations[self] = tf.no_op()
            return
        waiting, missed = (shared_value(lowering, x) for x in self.inputs)
        # A step fails after all of its writes, so that accumulators and counts agree.
        with tf.control_dependencies([lowering.operations[op] for op in self._step]):
            absent = tf.where_v2(tf.greater(tf.reshape(missed, [-1]), 0))
            lowering.operations[self] = tf.Assert(
                tf.less_equal(waiting, self._limit),
                [_beginning(self._limit), tf.reshape(absent, [-1])],
                summarize=1000,
            )

    def find(self, before: Sequence[Any] | None, now: Sequence[Any]) -> NoUpdateError | None:
        """Returns the error if there were too many steps; see `Watched.find`."""
        del before
        waiting, missed = now
        if waiting <= self._limit:
            return None
        return NoUpdateError(self._limit, np.flatnonzero(np.reshape(missed, -1)))
