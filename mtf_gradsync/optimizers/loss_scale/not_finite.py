"""Which gradients of which shards are not finite, and how a step that they cost is told."""

from __future__ import annotations

import sys
from typing import Any, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._scopes import root_scope
from mtf_gradsync.gradients import StageOperation
from mtf_gradsync.gradients.partial_sums import PartialSum, partial_sum, reduce_partial_sums
from mtf_gradsync.gradients.pending import PendingSums
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.optimizers.state.variables import state_variable
from mtf_gradsync.reduce import Strategy

# Of a list that may be as long as the model has variables times the mesh shards.
_MOST_NAMED = 8
_NONE = "none by itself, but the norm of all"


class NotFinite(StageOperation):
    """For each gradient, of each shard, whether it has a NaN or an infinity.

    Looks at what each processor has: a pending gradient stays pending.
    """

    takes_pending = True

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        axes: ReplicaAxes | None,
        strategy: Strategy,
        only_apart: bool = False,
    ):
        """Adds the operation.

        Args:
          grads: gradients, pending, per shard or whole, at least one.
          axes: the replica axes; None for no shards.
          strategy: how sums cross the mesh.
          only_apart: pass over gradients that all shards share.

        Outputs:
          A float32 tensor `[shards..., gradients]`, greater than 0 where one is not finite.
        """
        self._strategy, self._only_apart = strategy, only_apart
        self._shard_dims = list(axes.shard_dims) if axes else []
        names = axes.batch_dims if axes else None
        PendingSums.want(grads, False, names, strategy)
        shape = mtf.Shape([*self._shard_dims, mtf.Dimension("gradients", len(grads))])
        super().__init__(grads, [shape], "not_finite", [tf.float32])

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl, (output,) = lowering.mesh_impl(self), self.outputs
        slice_shape = mesh_impl.slice_shape(output.shape)
        parts = [partial_sum(lowering, grad) for grad in self.inputs]
        own = set(mesh_impl.tensor_layout(output.shape)) - {None}
        counts = [
            not self._only_apart
            or bool(own.intersection([*part.mesh_axes, *mesh_impl.tensor_layout(grad.shape)]))
            for grad, part in zip(self.inputs, parts)
        ]

        def look(*slices: tf.Tensor) -> tf.Tensor:
            finite = [tf.reduce_all(tf.math.is_finite(x)) for x in slices]
            found = 1.0 - tf.cast(tf.stack(finite), tf.float32)
            return tf.reshape(found * tf.constant(counts, tf.float32), slice_shape)

        found = mesh_impl.slicewise(look, *[part.value for part in parts])
        others = tuple(axis for axis in range(mesh_impl.shape.ndims) if axis not in own)
        (found,) = reduce_partial_sums(mesh_impl, [PartialSum(found, others)], self._strategy)
        self.set_outputs(lowering, [found])


class TellNotFinite(mtf.Operation):
    """Remembers which gradients were not finite; part of a branch that runs where some were not.

    On a placement mesh it prints them, too, to standard error. A TPU program cannot print: there
    `Told` looks at the variable, which the session hook does.

    Attributes:
      takes_a_hook: whether it was lowered where nothing is printed.
    """

    def __init__(
        self,
        found: Sequence[mtf.Tensor],
        variable: mtf.Variable,
        skipped: mtf.Variable,
        names: Sequence[str],
        owner: str,
    ):
        """Adds the operation.

        Args:
          found: one or two tensors that processors hold whole: `[shards..., gradients]`, and
            `[gradients]` of the sum over shards.
          variable: for all of them, one below the other, `[rows, gradients]`.
          skipped: the variable that counts steps left out.
          names: of the gradients' variables.
          owner: name of the wrapper.
        """
        super().__init__(list(found), name="tell_not_finite")
        self.takes_a_hook = False
        self.names = list(names)
        self.owner = owner
        self.places = _places([x.shape.size // len(self.names) for x in found], found)
        self._variable, self._skipped = variable, skipped
        # Of each lowering, a slice of the two variables.
        self._slices: list[tuple[Any, Any]] = []

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        count = len(self.names)

        def together(first: tf.Tensor, *sums: tf.Tensor) -> tf.Tensor:
            rows = [tf.reshape(first, [-1, count])]
            # Of a sum only what no shard explains.
            explained = tf.reduce_max(rows[0], 0, keepdims=True) > 0
            rows += [tf.where_v2(explained, 0.0, tf.reshape(x, [1, count])) for x in sums]
            return tf.concat(rows, 0)

        def write(variable: Any, slice_variable: Any, value: tf.Tensor) -> tf.Operation:
            return tf.assign(slice_variable, value)

        found = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs]
        value = mesh_impl.slicewise(together, *found).to_laid_out_tensor()
        variable = lowering.variables[self._variable]
        skipped = lowering.variables[self._skipped].laid_out_tensor.all_slices[0]
        self._slices.append((skipped, variable.laid_out_tensor.all_slices[0]))
        done = [variable.assign_to_slices(write, value.all_slices)]
        self.takes_a_hook = is_simd(mesh_impl)
        if not self.takes_a_hook:
            done.append(self._print(value.all_slices[0]))
        lowering.operations[self] = tf.group(*done)

    def _print(self, found: tf.Tensor) -> tf.Operation:
        where = tf.where_v2(found > 0)
        some = where[:_MOST_NAMED]
        lines = tf.strings.join(
            [tf.gather(self.names, some[:, 1]), tf.gather(self.places, some[:, 0])], " "
        )
        more = tf.shape(where)[0] - _MOST_NAMED
        rest = tf.where_v2(more > 0, tf.strings.format(" and {} more", more), "")
        named = tf.strings.reduce_join(lines, separator=", ")
        named = tf.where_v2(tf.equal(named, ""), _NONE, named)
        text = tf.strings.join([_beginning(self.owner), " ", named, rest, "."])
        return tf.print(text, output_stream=sys.stderr)

    def watch(self) -> Told:
        """Adds to the default graph what finds out about steps that were left out.

        Returns:
          What to ask after a step.
        """
        reads = [(s.read_value(), w.read_value()) for s, w in self._slices]
        return Told(self, reads)


class Told:
    """Tells of a session which steps it has left out, and why.

    Made by `TellNotFinite.watch`, while operations can still be added.
    """

    def __init__(self, told: TellNotFinite, reads: Sequence[tuple[tf.Tensor, tf.Tensor]]):
        self._told, self._reads = told, list(reads)
        self._skipped: list[int] | None = None

    def message(self, session: Any) -> str | None:
        """What to log after a step: which gradients the last step that was left out had lost.

        Args:
          session: what ran the step, a tf.Session or a session of `mtf_gradsync.simd`.

        Returns:
          A line; None where no step was left out since it was asked last, or before the first time.
        """
        values = session.run(self._reads)
        before, self._skipped = self._skipped, [int(skipped) for skipped, _ in values]
        if before is None:
            return None
        for old, new, (_, found) in zip(before, self._skipped, values):
            if new > old:
                rows, columns = np.nonzero(np.asarray(found) > 0)
                told = self._told
                named = [
                    f"{told.names[column]} {told.places[row]}"
                    for row, column in list(zip(rows, columns))[:_MOST_NAMED]
                ]
                more = len(rows) - _MOST_NAMED
                rest = f" and {more} more" if more > 0 else ""
                return f"{_beginning(told.owner)} {', '.join(named) or _NONE}{rest}."
        return None


def _beginning(owner: str) -> str:
    return f"{owner}: step left out, gradients that are not finite:"


def _places(rows: Sequence[int], found: Sequence[mtf.Tensor]) -> list[str]:
    """What to call the rows: shards, or the sum over them."""
    places = []
    for count, tensor in zip(rows, found):
        if tensor.shape.ndims == 1:
            places.append("(sum over shards)")
        else:
            places += [f"(shard {number})" for number in range(count)]
    return places


def places_variable(mesh: mtf.Mesh, name: str, rows: int, count: int) -> mtf.Variable:
    """The variable of `TellNotFinite`, in no checkpoint.

    Args:
      mesh: the mesh.
      name: its whole name.
      rows: of all tensors together.
      count: of gradients.

    Returns:
      A float32 variable that every processor holds whole.
    """
    dims = [mtf.Dimension("rows", rows), mtf.Dimension("gradients", count)]
    with root_scope():
        return state_variable(
            mesh,
            name,
            mtf.anonymous_shape(mtf.Shape(dims)),
            tf.float32,
            checkpointed=False,
            stacked=False,
        )
