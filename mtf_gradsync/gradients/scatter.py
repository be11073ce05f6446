"""Reduce-scatter of gradients, and all-gather of new values."""

from __future__ import annotations

import functools
from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import scalar_of, slice_function
from mtf_gradsync.gradients.partial_sums import partial_sum, reduce_partial_sums
from mtf_gradsync.gradients.pending import PendingSum, PendingSums
from mtf_gradsync.gradients.pending.linear import linear_positions
from mtf_gradsync.gradients.stage import StageOperation, dims_to_sum
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.reduce.one_level import PLACEMENT_BUCKET_BYTES
from mtf_gradsync.reduce.parts import Cut, Cuts, take_parts
from mtf_gradsync.reduce.scatter_gather import all_gather


def cuts_between(mesh_impl: Any, whole: mtf.Shape, part: mtf.Shape) -> Cuts:
    """How a tensor is cut that has the layout of one shape and is to have that of another."""
    before, after = mesh_impl.tensor_layout(whole), mesh_impl.tensor_layout(part)
    return tuple(
        sorted(
            Cut(after[axis], axis)
            for axis, (old, new) in enumerate(zip(whole.dims, part.dims))
            if old.name != new.name and before[axis] is None and after[axis] is not None
        )
    )


class ScatterGradients(StageOperation):
    """Reduces pending and per-shard gradients; each processor gets its part."""

    takes_pending = True

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        variables: Sequence[mtf.Variable],
        shapes: Sequence[mtf.Shape],
        axes: ReplicaAxes,
        strategy: Strategy,
    ):
        """Adds the operation; the shape of a part that is not cut is the variable's own."""
        self._wholes = [v.shape for v in variables]
        self._axes, self._strategy = axes, strategy
        self._sum_dims = dims_to_sum(grads, variables)
        # Those that are not cut are all-reduced together.
        for reduced in (True, False):
            wanted = [
                g
                for g, dims, old, new in zip(grads, self._sum_dims, self._wholes, shapes)
                if not dims and (old == new) is reduced
            ]
            PendingSums.want(wanted, reduced, axes.batch_dims, strategy)
        super().__init__(grads, shapes, name="scatter_gradients")

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        self._axes.check_mesh_impl(mesh_impl)
        sums, cuts = [], []
        for grad, dims, whole, output in zip(
            self.inputs, self._sum_dims, self._wholes, self.outputs
        ):
            lowered = lowering.tensors[grad]
            is_cut = dims or whole != output.shape
            # What was reduced for another reader is not sent again.
            is_made = isinstance(lowered, PendingSum) and lowered.sends_nothing
            sums.append(partial_sum(lowering, grad, dims, reduced=is_made or not is_cut))
            cuts.append(cuts_between(mesh_impl, whole, output.shape))
        self.set_outputs(lowering, reduce_partial_sums(mesh_impl, sums, self._strategy, cuts))


def scatter_gradients(
    grads: Sequence[mtf.Tensor],
    variables: Sequence[mtf.Variable],
    shapes: Sequence[mtf.Shape],
    axes: ReplicaAxes,
    strategy: Strategy,
) -> tuple[Sequence[mtf.Tensor], list[mtf.Tensor]]:
    """Reduces gradients over the mesh, of which each replica gets its part.

    Gradients are pending, reduced or per shard; `shapes` are those of the parts, or the variables'
    own. Returns what was sent (gradients before casts and scales, which are done again after the
    sum), and the parts.
    """
    sources, operations = zip(*map(_undone, grads))
    parts = ScatterGradients(sources, variables, shapes, axes, strategy).outputs
    return sources, [functools.reduce(_done, some, x) for x, some in zip(parts, operations)]


def _undone(grad: mtf.Tensor) -> tuple[mtf.Tensor, list[mtf.Operation]]:
    """Returns what was cast or scaled to make a gradient, and the operations that did it, in order.

    Done after the sum, casts and scales give the bits that they give without parts, and what is
    sent is in the dtype that Mesh-TF sends.
    """
    operations: list[mtf.Operation] = []
    while _is_cast_or_scale(grad.operation):
        operations.append(grad.operation)
        (grad,) = grad.operation.inputs
    return grad, operations[::-1]


def _is_cast_or_scale(operation: mtf.Operation) -> bool:
    return isinstance(operation, mtf.ScalarMultiplyOperation) or (
        isinstance(operation, mtf.SlicewiseOperation)
        and len(operation.inputs) == len(operation.outputs) == 1
        and operation.inputs[0].shape == operation.outputs[0].shape
        and not operation.unsplittable_dims
        and linear_positions(operation, [0]) is not None
    )


def _done(x: mtf.Tensor, operation: mtf.Operation) -> mtf.Tensor:
    """Casts or scales a tensor as an operation did with another one."""
    if isinstance(operation, mtf.ScalarMultiplyOperation):
        return x * scalar_of(operation)
    fn, dtype = slice_function(operation), operation.outputs[0].dtype
    return mtf.slicewise(fn, [x], output_dtype=dtype, splittable_dims=x.shape.dims)


class TakePart(StageOperation):
    """Gives each processor its part of a tensor that processors share. Nothing is sent."""

    def __init__(self, whole: mtf.Tensor, shape: mtf.Shape):
        super().__init__([whole], [shape], name="take_part")

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        (whole,), (part,) = self.inputs, self.outputs
        value = lowering.tensors[whole].to_laid_out_tensor()
        cuts = cuts_between(mesh_impl, whole.shape, part.shape)
        self.set_outputs(lowering, [take_parts(mesh_impl, value, cuts)])


class GatherParts(StageOperation):
    """All-gathers tensors of which each processor has its part, all of them together."""

    def __init__(self, parts: Sequence[mtf.Tensor], shapes: Sequence[mtf.Shape]):
        super().__init__(parts, shapes, name="gather_parts")

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        parts = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs]
        cuts = [
            cuts_between(mesh_impl, whole.shape, part.shape)
            for part, whole in zip(self.inputs, self.outputs)
        ]
        self.set_outputs(lowering, all_gather(mesh_impl, parts, cuts, PLACEMENT_BUCKET_BYTES))
