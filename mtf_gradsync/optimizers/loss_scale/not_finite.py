"""Says which gradients of which shards were not finite, where a step was skipped for them."""

from __future__ import annotations

import sys
from typing import Any, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.state.variables import named_state
from mtf_gradsync.step import Watched

# Of a list that may be as long as the model has variables times the mesh shards.
_MOST_NAMED = 8
_NONE = "none by itself, but the norm of all"


class ReportNotFinite(Watched):
    """Remembers which gradients were not finite; part of a branch that runs where some were not.

    On a placement mesh it prints them, too, to standard error. A TPU program cannot print: there a
    `Watch` looks at the variables, which the session hook does. What was found stands in the
    variable `<owner>/not_finite`, which is in no checkpoint.
    """

    def __init__(
        self,
        found: Sequence[mtf.Tensor],
        skipped: mtf.Variable,
        names: Sequence[str],
        owner: str,
    ):
        """Adds the operation.

        Args:
          found: tensors that processors hold whole: `[shards..., gradients]` where there are
            shards, and last `[gradients]` of the sum over shards.
          skipped: the variable that counts skipped steps.
          names: of the gradients' variables.
          owner: name of the wrapper.
        """
        count = len(names)
        shards = found[0].shape.size // count if len(found) > 1 else 0
        self._places = [*(f"(shard {number})" for number in range(shards)), "(sum over shards)"]
        self._names = list(names)
        self._beginning = f"{owner}: step left out, gradients that are not finite:"
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
                # Of a sum only what no shard explains.
                total = tf.where_v2(tf.reduce_max(rows, 0, keepdims=True) > 0, 0.0, total)
            return tf.concat([*shards, total], 0)

        def write(variable: Any, slice_variable: Any, value: tf.Tensor) -> tf.Operation:
            return tf.assign(slice_variable, value)

        found = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs]
        value = lowering.mesh_impl(self).slicewise(together, *found).to_laid_out_tensor()
        done = [lowering.variables[self._found].assign_to_slices(write, value.all_slices)]
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
        """A line for the log, where a step was skipped since `before`; see `Watched.find`."""
        skipped, found = now
        if before is None or skipped <= before[0]:
            return None
        rows, columns = np.nonzero(np.asarray(found) > 0)
        named = [f"{self._names[c]} {self._places[r]}" for r, c in zip(rows, columns)]
        more = len(named) - _MOST_NAMED
        rest = f" and {more} more" if more > 0 else ""
        return f"{self._beginning} {', '.join(named[:_MOST_NAMED]) or _NONE}{rest}."
