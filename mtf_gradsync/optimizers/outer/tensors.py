"""Tensors that differ between islands: reshapes, agreement, and dependent variables."""

from __future__ import annotations

from typing import Collection, Iterable, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.measures import NotFinite
from mtf_gradsync.gradients.partial_sums import PartialSum, reduce_partial_sums
from mtf_gradsync.gradients.stage import StageOperation, reduced_values, reshaped
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step import ValuesAfter


class SameSlices(StageOperation):
    """Reshapes the slices of tensors, without communication.

    It adds a dimension for the islands to tensors with a value for each island, or removes it: the
    slices of the new shapes are of the same size.
    """

    def __init__(self, tensors: Sequence[mtf.Tensor], shapes: Sequence[mtf.Shape]):
        super().__init__(tensors, shapes, "same_slices")

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        values = reduced_values(lowering, self.inputs)
        shapes = [mesh_impl.slice_shape(output.shape) for output in self.outputs]
        self.set_outputs(lowering, [reshaped(mesh_impl, *x) for x in zip(values, shapes)])


class Agreed(StageOperation):
    """Combines a boolean of each island to one for all of them."""

    def __init__(self, holds: mtf.Tensor, by_any: bool, islands: ReplicaAxes, strategy: Strategy):
        self._by_any, self._islands, self._strategy = by_any, islands, strategy
        super().__init__([holds], [holds.shape], "agreed")

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        (holds,) = reduced_values(lowering, self.inputs)
        counts = mesh_impl.slicewise(lambda x: tf.cast(x, tf.float32), holds)
        axes = tuple(sorted(self._islands.mesh_axes))
        (count,) = reduce_partial_sums(mesh_impl, [PartialSum(counts, axes)], self._strategy)
        least = 0.5 if self._by_any else self._islands.num_shards - 0.5
        self.set_outputs(lowering, [mesh_impl.slicewise(lambda x: x > least, count)])


# The outputs of these are the same on all islands.
_SAME_EVERYWHERE = (Agreed, NotFinite)


def differing_variables(
    operations: Sequence[mtf.Operation],
    sources: Iterable[mtf.Tensor],
    candidates: Collection[mtf.Variable],
) -> list[mtf.Variable]:
    """Returns the candidates that are assigned values that differ between islands, in order.

    These are values that depend on `sources`. `operations` are those of the graph, in order.
    """
    differs: set[mtf.Tensor] = set(sources)
    found: set[mtf.Variable] = set()
    while True:
        before = len(found)
        for operation in operations:
            reads = operation.reads if isinstance(operation, ValuesAfter) else ()
            differs.update(x for x, v in zip(operation.outputs, reads) if v.value in differs)
            is_same = isinstance(operation, _SAME_EVERYWHERE)
            if is_same or not differs.intersection(operation.inputs):
                continue
            differs.update(operation.outputs)
            written = getattr(operation, "variables", ())
            is_one_by_one = len(written) == len(operation.inputs)
            for number, variable in enumerate(written):
                value = operation.inputs[number] if is_one_by_one else None
                if variable in candidates and (value is None or value in differs):
                    found.add(variable)
                    differs.add(variable.value)
        if len(found) == before:
            return [v for v in candidates if v in found]
