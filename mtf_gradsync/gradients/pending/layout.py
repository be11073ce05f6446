"""The layout of tensors on a mesh, and the axes that the batch is split over."""

from __future__ import annotations

from typing import Callable, NamedTuple

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.mesh.axes import ReplicaAxes

Axes = frozenset


class Layout(NamedTuple):
    """The layout of tensors, before or while a graph is lowered.

    Attributes:
      axis_of: the mesh axis that a dimension of a tensor of a mesh is split over, or None.
      replica_axes: the mesh axes of a mesh that the batch is split over.
    """

    axis_of: Callable[[mtf.Mesh, mtf.Dimension], int | None]
    replica_axes: Callable[[mtf.Mesh], Axes]

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
        """The replica axes that a tensor is split over."""
        return self.split(tensor) & self.replica_axes(tensor.mesh)

    def of_shards(self, tensor: mtf.Tensor) -> bool:
        """Whether each shard holds its own part of a tensor."""
        replica_axes = self.replica_axes(tensor.mesh)
        return bool(replica_axes) and self.split(tensor).issuperset(replica_axes)

    def _order(self, shape: mtf.Shape, mesh: mtf.Mesh) -> dict[int, int]:
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
        return self._order(source.shape, mesh) == self._order(result.shape, mesh)
