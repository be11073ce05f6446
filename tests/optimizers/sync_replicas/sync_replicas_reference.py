"""Synchronous replicas in numpy float64: who contributes, when an update is due, what it applies.

Reference: TensorFlow's `tf.compat.v1.train.SyncReplicasOptimizer`, with replicas in lock step.
"""

from __future__ import annotations

from typing import Callable, Sequence

import numpy as np

from tests.reference import Values, is_finite


class SyncReplicas:
    """The replicas, their tokens and their accumulators.

    A step is one call in which every replica computes one gradient. A replica's gradient is
    dropped when the replica is masked out, when it computed for an older step than the global
    step (stale), or when any entry of any of its gradients is not finite.

    Attributes:
      values: the variables.
      averages: exponential moving averages of the variables, if there is a decay.
      local_step: [num_replicas], the step that each replica computes for. A test sets it back.
      global_step: updates applied.
      sums, count: the contributions since the last update.
      made, dropped: [num_replicas], steps on which a replica did and did not contribute.
    """

    def __init__(
        self,
        update: Callable[[Values, Values], Values],
        num_replicas: int,
        replicas_to_aggregate: int,
        values: Values,
        average_decay: float | None = None,
    ) -> None:
        self.update = update
        self.num_replicas = num_replicas
        self.replicas_to_aggregate = replicas_to_aggregate
        self.average_decay = average_decay
        self.values = {k: np.array(v, np.float64) for k, v in values.items()}
        self.averages = {} if average_decay is None else dict(self.values)
        self.local_step = np.zeros(num_replicas, int)
        self.global_step = 0
        self.made = np.zeros(num_replicas, int)
        self.dropped = np.zeros(num_replicas, int)
        self._clear()

    def _clear(self) -> None:
        self.count = 0
        self.sums = {k: np.zeros_like(v) for k, v in self.values.items()}

    def step(
        self, grads_by_replica: Sequence[Values], contributes: np.ndarray | None = None
    ) -> bool:
        """Takes one gradient of every replica; says whether an update was applied."""
        assert len(grads_by_replica) == self.num_replicas
        for replica, grads in enumerate(grads_by_replica):
            asked = contributes is None or contributes[replica]
            fresh = self.local_step[replica] >= self.global_step
            if not (asked and fresh and is_finite(grads)):
                self.dropped[replica] += 1
                continue
            self.made[replica] += 1
            self.count += 1
            for k in self.sums:
                self.sums[k] = self.sums[k] + grads[k]
        if self.count < self.replicas_to_aggregate:
            return False
        self.values = self.update(self.values, {k: v / self.count for k, v in self.sums.items()})
        self._clear()
        self.global_step += 1
        # Every replica gets a token, the ones that were stale too.
        self.local_step[:] = self.global_step
        for k, average in self.averages.items():
            rate = 1 - self.average_decay
            self.averages[k] = average - rate * (average - self.values[k])
        return True
