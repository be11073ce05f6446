"""Reports which gradients of which shards were not finite on a skipped step."""

from __future__ import annotations

import sys
from typing import Any, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.state.variables import named_state
from mtf_gradsync.step import Watched

# The full list may be as long as the number of variables times the number of shards.
_MOST_NAMED = 8
_NONE = "none by itself, but the norm of all"


class ReportNotFinite(Watched):
    """Records which gradients were not finite, in a branch that runs on steps with such gradients.

    On a placement mesh it also prints them to standard error. The record is the variable
    `<owner>/not_finite`, which is in no checkpoint.
    """

    def __init__(
        self,
        found: Sequence[mtf.Tensor],
        skipped: mtf.Variable,
        names: Sequence[str],
        owner: str,
    ):
        """Takes flags, the same on all processors, and names of the gradients' variables.

        Flags are `[shards..., gradients]` if there are shards, and last `[gradients]` for the sum
        over shards. `skipped` counts skipped steps; `owner` is the wrapper's name.
        """
        count = len(names)
        shards = found[0].shape.size // count if len(found) > 1 else 0
        self._places = [*(f"(shard {number})" for number in range(shards)), "(sum over shards)"]
        self._names = list(names)
        self._beginning = f"{owner}: step skipped, gradients that are not finite:"
        dims = [mtf.Dimension("rows", len(self._places)), mtf.Dimension("gradients", count)]
        shape = mtf.anonymous_shape(mtf.Shape(dims))
        self._found = named_state(
            skipped.mesh, f"{owner}/not_finite", shape, tf.float32, checkpointed=False
        )
        super().__init__(found, [skipped, self._found], "tell_not_finite")

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        self.note_lowering(lowering)
        count = len(self._names)

        def together(*found: tf.Tensor) -> tf.Tensor:
            *shards, total = (tf.reshape(x, [-1, count]) for x in found)
            for rows in shards:
                # Sums only if no shard's gradient explains them.
                total = tf.where_v2(tf.reduce_max(rows, 0, keepdims=True) > 0, 0.0, total)
            return tf.concat([*shards, total], 0)

        found = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs]
        value = lowering.mesh_impl(self).slicewise(together, *found).to_laid_out_tensor()
        record = lowering.variables[self._found]
        done = [record.assign_to_slices(lambda _, x, new: tf.assign(x, new), value.all_slices)]
        if not self.takes_a_hook:
            done.append(self._print(value.all_slices[0]))
        lowering.operations[self] = tf.group(*done)

    def _print(self, found: tf.Tensor) -> tf.Operation:
        where = tf.where_v2(found > 0)
        some = where[:_MOST_NAMED]
        lines = tf.strings.join(
            [tf.gather(self._names, some[:, 1]), tf.gather(self._places, some[:, 0])], " "
        )
        more = tf.shape(where)[0] - _MOST_NAMED
        rest = tf.where_v2(more > 0, tf.strings.format(" and {} more", more), "")
        named = tf.strings.reduce_join(lines, separator=", ")
        named = tf.where_v2(tf.equal(named, ""), _NONE, named)
        text = tf.strings.join([self._beginning, " ", named, rest, "."])
        return tf.print(text, output_stream=sys.stderr)

    def find(self, before: Sequence[Any] | None, now: Sequence[Any]) -> str | None:
        """Returns a line for the log if a step was skipped since `before`; see `Watched.find`."""
        skipped, found = now
        if before is None or skipped <= before[0]:
            return None
        rows, columns = np.nonzero(np.asarray(found) > 0)
        named = [f"{self._names[c]} {self._places[r]}" for r, c in zip(rows, columns)]
        more = len(named) - _MOST_NAMED
        rest = f" and {more} more" if more > 0 else ""
        return f"{self._beginning} {', '.join(named[:_MOST_NAMED]) or _NONE}{rest}."
