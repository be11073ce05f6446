"""The layout of tensors on a mesh, and the axes that the batch is split over."""

from __future__ import annotations

from typing import Callable, Collection, NamedTuple

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import loop_body
from mtf_gradsync.gradients.stage import StageOperation
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.step import ValuesAfter
from mtf_gradsync.step.lowering import flat

Axes = frozenset
# Operations without inputs that bring no data of the batch.
_WITHOUT_DATA = (
    mtf.Variable,
    mtf.Constant,
    mtf.RandomOperation,
    mtf.RangeOperation,
    StageOperation,
    ValuesAfter,
)


class Layout(NamedTuple):
    """The layout of tensors, before or while a graph is lowered.

    Attributes:
      axis_of: the mesh axis that a dimension of a tensor of a mesh is split over, or None.
      replica_axes: the mesh axes of a mesh that the batch is split over.
      own: the replica axes along which each shard's slice of a tensor is of that shard's data alone
        (see `own_slices`). None takes all axes that split the tensor, which is enough where shards
        are only added up.
    """

    axis_of: Callable[[mtf.Mesh, mtf.Dimension], int | None]
    replica_axes: Callable[[mtf.Mesh], Axes]
    own: Callable[[mtf.Tensor], Axes] | None = None

    @classmethod
    def of(cls, axes: ReplicaAxes, of_mesh: mtf.Mesh) -> Layout:
        """Makes the layout of a graph of which a mesh is to be lowered on that of replica axes.

        How tensors of other meshes are split is not known: it is as if nothing split them.
        """

        def axis_of(mesh: mtf.Mesh, dim: mtf.Dimension) -> int | None:
            if mesh is not of_mesh:
                return None
            return axes.layout.tensor_dimension_to_mesh_axis(dim, axes.mesh_shape)

        return cls(axis_of, lambda mesh: Axes(axes.mesh_axes if mesh is of_mesh else ()))

    def split(self, tensor: mtf.Tensor) -> Axes:
        """The mesh axes that a tensor is split over."""
        axes = {self.axis_of(tensor.mesh, d) for d in tensor.shape.dims}
        return Axes(axes - {None})

    def split_over_shards(self, tensor: mtf.Tensor) -> Axes:
        """The replica axes along which each shard has its own slice of a tensor."""
        split = self.split(tensor) & self.replica_axes(tensor.mesh)
        return split & self.own(tensor) if split and self.own else split

    def of_shards(self, tensor: mtf.Tensor) -> bool:
        """Whether each shard holds its own part of a tensor."""
        replica_axes = self.replica_axes(tensor.mesh)
        return bool(replica_axes) and self.split_over_shards(tensor).issuperset(replica_axes)

    def order(self, shape: mtf.Shape, mesh: mtf.Mesh) -> dict[int, int]:
        """For each mesh axis that splits a shape, the product of dimensions before that one."""
        before, found = 1, {}
        for dim in shape.dims:
            axis = self.axis_of(mesh, dim)
            if axis is not None:
                found[axis] = before
            before *= dim.size
        return found

    def stays_in_place(self, operation: mtf.ReshapeOperation) -> bool:
        """Whether a reshape moves nothing between processors."""
        (source,), (result,) = operation.inputs, operation.outputs
        mesh = operation.mesh
        return self.order(source.shape, mesh) == self.order(result.shape, mesh)


def own_slices(
    graph: mtf.Graph, layout: Layout, batch_dims: Collection[str]
) -> Callable[[mtf.Tensor], Axes]:
    """Finds the replica axes along which a shard's slice of a tensor is of its own data alone.

    A dimension of the batch is the shards' own, and so is what stays in place when it is computed
    from their own slices. Other dimensions that are split over a replica axis are not: experts get
    examples of all shards by a reshape that moves them, sums over the shards are broadcast to a
    variable that is split, and an input with a dimension of variables is a factor for experts.
    """
    known: dict[mtf.Tensor, Axes] = {}
    of_variables = {tuple(v.shape.dims) for v in graph.trainable_variables}
    names = {d.name for dims in of_variables for d in dims}

    def own(tensor: mtf.Tensor, found: Axes = frozenset()) -> Axes:
        if tensor in known:
            return known[tensor]
        split = {layout.axis_of(tensor.mesh, d): d.name for d in tensor.shape.dims}
        replica_axes = layout.replica_axes(tensor.mesh).intersection(split)
        return Axes(a for a in replica_axes if split[a] in batch_dims or a in found)

    def computed(operation: mtf.Operation, position: int) -> Axes:
        """The axes along which an output is computed from own slices."""
        output, inputs = operation.outputs[position], list(map(own, operation.inputs))
        if isinstance(operation, mtf.WhileLoopOperation):
            return own(loop_body(operation).outputs[position])
        if not inputs:
            if isinstance(operation, _WITHOUT_DATA):
                return Axes()
            data = [d for d in output.shape.dims if d.name not in names]
            return Axes({layout.axis_of(output.mesh, d) for d in data} - {None})
        if isinstance(operation, StageOperation) and len(inputs) >= len(operation.outputs):
            return inputs[position]  # a list of gradients
        if isinstance(operation, mtf.ReshapeOperation):
            (source,), mesh = operation.inputs, operation.mesh
            before, after = (layout.order(x.shape, mesh) for x in (source, output))
            return Axes(a for a in inputs[0] if before[a] == after.get(a))
        if isinstance(operation, mtf.AddOperation) and tuple(output.shape.dims) in of_variables:
            # With a term that all shards share, a variable's gradient is no shard's own.
            return inputs[0].intersection(*inputs)
        return Axes().union(*inputs)

    for operation in flat(graph.operations):
        for position, output in enumerate(operation.outputs):
            known[output] = own(output, computed(operation, position))
    return own
