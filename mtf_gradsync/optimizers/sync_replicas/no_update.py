"""The error of updates that do not come any more, and how a program learns of it."""

from __future__ import annotations

from typing import Any, Iterable, Sequence

import numpy as np

from mtf_gradsync._private.libraries import tf


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
        return f"{beginning(self.limit)} {self.replicas}."


def beginning(limit: int) -> str:
    """What the error says before it names replicas."""
    return (
        f"No update for more than max_steps_without_update={limit} steps. These replicas (shards, "
        "row by row) did not contribute in the last step:"
    )


class Watch:
    """Tells of a session whether its last step had waited too long for an update.

    Made by `SyncReplicasOptimizer.limit.watch()`, while operations can still be added.
    """

    def __init__(self, limit: int, found: Sequence[tuple[tf.Tensor, tf.Tensor]]):
        """Remembers what to read.

        Args:
          limit: the largest number of steps in a row without an update.
          found: for each lowering a read of `waiting`, a scalar, and of `missed`, one number for
            each replica.
        """
        self._limit = limit
        self._found = list(found)

    def error(self, session: Any) -> NoUpdateError | None:
        """What to raise after a step, or in place of the error that it failed with; or None.

        Args:
          session: what ran the step, a tf.Session or a session of `mtf_gradsync.simd`.
        """
        try:
            found = session.run(self._found)
        except tf.errors.FailedPreconditionError:
            # The step failed before anything was found.
            return None
        for waiting, missed in found:
            if waiting > self._limit:
                return NoUpdateError(self._limit, np.flatnonzero(np.reshape(missed, -1)))
        return None
