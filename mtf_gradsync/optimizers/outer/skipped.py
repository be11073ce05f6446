"""The islands that an outer step skips: their losses, and the report of them."""

from __future__ import annotations

import sys
from typing import Any, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.losses import losses_behind
from mtf_gradsync.gradients.measures import NotFinite
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.state.variables import named_state
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step import Watched


class ReportSkippedIslands(Watched):
    """Names the islands that are skipped; part of a branch that runs where some are.

    On a placement mesh it prints them to standard error; elsewhere a `Watch` looks at the count.
    `skipped` is 1 for islands that are skipped, else 0, and the same on all processors. `count`
    counts for each island how often it was skipped.
    """

    def __init__(self, skipped: mtf.Tensor, count: mtf.Variable, owner: str):
        super().__init__([skipped], [count], "tell_skipped")
        self._beginning = (
            f"{owner}: outer step without islands whose loss or values are not finite:"
        )

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        self.note_lowering(lowering)
        if self.takes_a_hook:
            lowering.operations[self] = tf.no_op()
            return
        skipped = lowering.tensors[self.inputs[0]].to_laid_out_tensor().all_slices[0]
        islands = tf.reshape(tf.where_v2(tf.reshape(skipped, [-1]) > 0), [-1])
        numbers = tf.strings.reduce_join(tf.as_string(islands), separator=", ")
        line = tf.strings.join([self._beginning, " ", numbers, "."])
        lowering.operations[self] = tf.print(line, output_stream=sys.stderr)

    def find(self, before: Sequence[Any] | None, now: Sequence[Any]) -> str | None:
        """A line for the log, where islands were skipped since `before`; see `Watched.find`."""
        if before is None:
            return None
        islands = np.flatnonzero(np.reshape(now[0], -1) > np.reshape(before[0], -1))
        return f"{self._beginning} {', '.join(map(str, islands))}." if len(islands) else None


class LossesOfPeriod:
    """Finds which islands have had a loss that is not finite since the outer step before.

    Each island keeps the number of the last period that it had one in, so that nothing has to be
    reset, and nothing is sent between islands. Periods are numbered from 1.

    Attributes:
      variable: `<owner>/bad_loss`, the number for each island, or 0.
      last: its value after the step.
    """

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        period: mtf.Tensor,
        islands: ReplicaAxes,
        strategy: Strategy,
        owner: str,
    ):
        dims = list(islands.shard_dims)
        self.variable = named_state(
            period.mesh, f"{owner}/bad_loss", mtf.Shape(dims), num_shard_dims=len(dims), fill=0
        )
        self._period, last = period, self.variable.value
        losses = losses_behind(grads)
        if losses:
            # A loss that islands share says of none of them that it is its own.
            found = NotFinite(losses, islands, strategy, only_apart=True).outputs[0]
            bad = mtf.greater(mtf.reduce_sum(found, output_shape=mtf.Shape(dims)), 0.0)
            last = last + (period - last) * mtf.cast(bad, tf.int32)
        self.last = last

    def are_bad(self) -> mtf.Tensor:
        """1 for each island that had one, else 0: float32 `[islands...]`."""
        return mtf.cast(mtf.equal(self.last, self._period), tf.float32)
