"""The replica axes of a mesh, which split the batch, and groups of processors along mesh axes."""

from __future__ import annotations

from typing import Any, Iterable, Protocol, Sequence, Tuple, Union

import gin

from mtf_gradsync._common import check_whole_number, elements
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import meshes_made


class Shape(Protocol):
    """A protocol, for type checkers, of what this package uses of `mtf.Shape`."""

    @property
    def dims(self) -> Any:
        """The dimensions."""


class LayoutRules(Protocol):
    """A protocol, for type checkers, of what this package uses of `mtf.LayoutRules`."""

    def tensor_layout(self, tensor_shape: Any, mesh_shape: Any, /) -> Any:
        """Returns for each dimension of a tensor the number of the mesh axis that splits it.

        The number is None for a dimension that is not split. The arguments are the shapes of the
        tensor and of the mesh, each an `mtf.Shape`.
        """


#: "batch:4;model:2", pairs of a name and a size (as `mtf.Dimension` is), or an `mtf.Shape`.
MeshShapeLike = Union[str, Sequence[Tuple[str, int]], Shape]
#: "batch:batch;heads:model", pairs of tensor and mesh dimension, or an `mtf.LayoutRules`.
LayoutLike = Union[str, Iterable[Tuple[str, str]], LayoutRules]


def as_dim_names(dims: str | Sequence[str], argument: str = "batch_dims") -> tuple[str, ...]:
    """Returns dimension names as a tuple; if `dims` is a string, commas separate the names.

    Raises a ValueError if `dims` is neither a string nor a sequence of strings, or if a name is
    given twice. `argument` is the name by which the error calls `dims`.
    """
    if isinstance(dims, str):
        dims = [name.strip() for name in dims.split(",") if name.strip()]
    names = elements(dims)
    if names is None or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"{argument} must be names of tensor dimensions such as ('batch',), got {dims!r}."
        )
    if len(set(names)) != len(names):
        raise ValueError(f"{argument} must name each dimension once, got {names!r}.")
    return tuple(names)


def as_mesh_shape(mesh_shape: MeshShapeLike) -> mtf.Shape:
    """Returns a mesh shape, in any of the forms of `MeshShapeLike`, as `mtf.Shape`.

    Raises ValueError if `mesh_shape` is in none of the forms of `MeshShapeLike`, if a dimension has
    no size or a size below 1, or if a name is given twice.
    """
    shape, cause = None, None
    try:
        is_given = isinstance(mesh_shape, (str, mtf.Shape))
        shape = mtf.convert_to_shape(mesh_shape if is_given else elements(mesh_shape))
    except (ValueError, TypeError, AttributeError) as error:
        cause = error
    if shape is None or not all(dim and isinstance(dim.name, str) for dim in shape.dims):
        raise ValueError(
            "mesh_shape must be a mesh shape such as 'batch:4;model:2' or an mtf.Shape, got "
            f"{mesh_shape!r}."
        ) from cause
    if len(set(shape.dimension_names)) != len(shape.dimension_names):
        raise ValueError(f"mesh_shape names a mesh dimension twice: {shape.to_string}.")
    for dim in shape.dims:
        check_whole_number(f"The size of mesh dimension {dim.name!r}", dim.size)
    return shape


def as_layout(layout: Any) -> mtf.LayoutRules:
    """Returns a layout, in any of the forms of `LayoutLike`, as `mtf.LayoutRules`.

    Raises ValueError if `layout` is in none of the forms of `LayoutLike`.
    """
    try:
        if not isinstance(layout, (str, mtf.LayoutRules)):
            # Mesh-TF looks at the pairs only when they are used.
            pairs = elements(layout)
            layout = [(tensor_dim, mesh_dim) for tensor_dim, mesh_dim in pairs or [None]]
        rules = mtf.convert_to_layout_rules(layout)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "layout must map tensor dimensions to mesh dimensions, such as "
            f"'batch:batch;heads:model' or an mtf.LayoutRules, got {layout!r}."
        ) from error
    return rules


@gin.configurable(module="mtf_gradsync")
class ReplicaAxes:
    """The mesh axes that split a batch, and the shards along them.

    Each shard of the batch has one coordinate along each replica axis. Shards are numbered in
    row-major order over `shard_dims`.

    Attributes:
      mesh_shape: `mtf.Shape` of the mesh.
      layout: `mtf.LayoutRules`.
      batch_dims: names of the tensor dimensions that the batch is split along.
      mesh_axes: the replica axes, as indices into `mesh_shape`.
      shard_dims: one `mtf.Dimension` per replica axis. It has the name of a batch dimension, so
        that the layout splits it over the replica axis, and the size of the replica axis.
      num_shards: product of the sizes of `shard_dims`.

    Examples:
      >>> axes = gs.ReplicaAxes("rows:2;cols:4", "batch:rows;hidden:cols")
      >>> axes.num_shards, axes.shard_dims
      (2, (Dimension(name='batch', size=2),))
    """

    def __init__(
        self,
        mesh_shape: MeshShapeLike,
        layout: LayoutLike,
        batch_dims: str | Sequence[str] = ("batch",),
    ):
        """Finds the replica axes.

        Args:
          mesh_shape: anything that `mtf.convert_to_shape` takes ("batch:4;model:2").
          layout: anything that `mtf.convert_to_layout_rules` takes ("batch:batch;heads:model").
          batch_dims: names of the tensor dimensions that the batch is split along. The mesh axes
            that split these dimensions are the replica axes. A dimension that the layout does not
            split adds no axis. An empty sequence says that the batch is not split at all.

        Raises:
          ValueError: mesh_shape or layout cannot be read, a batch dimension is split over two
            mesh axes, two batch dimensions are split over the same mesh axis, or a mesh of
            several processors splits no batch dimension.
        """
        self.mesh_shape = as_mesh_shape(mesh_shape)
        self.layout = as_layout(layout)
        self.batch_dims = as_dim_names(batch_dims)
        axes: list[int] = []
        dims: list[mtf.Dimension] = []
        for name in self.batch_dims:
            try:
                axis = self.layout.tensor_dimension_to_mesh_axis(
                    mtf.Dimension(name, 1), self.mesh_shape
                )
            except ValueError as error:
                raise ValueError(
                    f"Batch dimension {name!r} is split over several mesh dimensions of "
                    f"{self.mesh_shape.to_string} by {self.layout}; split it over one."
                ) from error
            if axis is None:
                continue
            if axis in axes:
                raise ValueError(
                    f"Batch dimensions {dims[axes.index(axis)].name!r} and {name!r} are both "
                    f"split over mesh dimension {self.mesh_shape[axis].name!r} by {self.layout}; "
                    "name only one of them in batch_dims."
                )
            axes.append(axis)
            dims.append(mtf.Dimension(name, self.mesh_shape[axis].size))
        if self.batch_dims and not axes and self.mesh_shape.size > 1:
            raise ValueError(
                f"None of the batch dimensions {self.batch_dims} is split over the mesh "
                f"{self.mesh_shape.to_string} by {self.layout}. Name in batch_dims the "
                "dimensions along which the layout splits the batch (if a variable has such a "
                "dimension, each shard gets its own copy of the variable), or give batch_dims=() "
                "if the layout splits no batch."
            )
        self.mesh_axes: tuple[int, ...] = tuple(axes)
        self.shard_dims: tuple[mtf.Dimension, ...] = tuple(dims)
        self.num_shards: int = mtf.Shape(dims).size

    def free_shard_dims(self, shape: mtf.Shape) -> tuple[mtf.Dimension, ...]:
        """Returns the shard dims whose mesh axis does not split a tensor of this shape."""
        used = self._split(shape)
        return tuple(d for d, axis in zip(self.shard_dims, self.mesh_axes) if axis not in used)

    def slice_shape(self, shape: mtf.Shape) -> tuple[int, ...]:
        """Returns the shape of a processor's slice of a tensor of this shape."""
        sizes = [1 if axis is None else self.mesh_shape[axis].size for axis in self._split(shape)]
        return tuple(dim.size // size for dim, size in zip(shape.dims, sizes))

    def _split(self, shape: mtf.Shape) -> list[int | None]:
        return list(self.layout.tensor_layout(shape, self.mesh_shape))

    def check_mesh_impl(self, mesh_impl: mtf.MeshImpl) -> None:
        """Raises ValueError if a mesh has another shape, or splits the shard dims in another way.

        `mesh_impl` is the mesh that the program is lowered on.
        """
        for dim, axis in zip(self.shard_dims, self.mesh_axes):
            found = mesh_impl.tensor_dimension_to_mesh_axis(dim)
            if mesh_impl.shape != self.mesh_shape or found != axis:
                raise ValueError(
                    f"The replica axes were given for mesh {self.mesh_shape.to_string} with "
                    f"{self.layout}, but dimension {dim.name!r} is lowered on mesh "
                    f"{mesh_impl.shape.to_string} with {mesh_impl.layout_rules}. Give the "
                    "optimizer the mesh_shape and layout of the mesh that the program is lowered "
                    "on."
                )

    def __repr__(self) -> str:
        return (
            f"ReplicaAxes(mesh_shape={self.mesh_shape.to_string!r}, layout={self.layout!r}, "
            f"batch_dims={self.batch_dims!r}, num_shards={self.num_shards})"
        )


def check_axes(axes: Any) -> None:
    """Raises TypeError unless axes is a ReplicaAxes."""
    if not isinstance(axes, ReplicaAxes):
        raise TypeError(
            "axes must be a ReplicaAxes, such as ReplicaAxes('batch:4;model:2', 'batch:batch'), "
            f"got {axes!r}."
        )


def resolve_axes(
    axes: ReplicaAxes | None = None,
    mesh_shape: MeshShapeLike | None = None,
    layout: LayoutLike | None = None,
    batch_dims: str | Sequence[str] = ("batch",),
) -> ReplicaAxes | None:
    """Returns the replica axes for a caller's arguments: `axes`, or those of the other arguments.

    `mesh_shape` and `layout` are Mesh-TF's. `batch_dims` are the names of the dimensions that the
    batch is split along. Returns None if neither `axes` nor mesh_shape and layout are given. Raises
    ValueError if `axes` is given together with mesh_shape or layout, or if only one of mesh_shape
    and layout is given.
    """
    if axes is not None:
        check_axes(axes)
        if mesh_shape is not None or layout is not None:
            raise ValueError(
                "Give either axes or mesh_shape and layout, not both: got "
                f"axes={axes!r}, mesh_shape={mesh_shape!r}, layout={layout!r}."
            )
        return axes
    if mesh_shape is None and layout is None:
        return None
    if mesh_shape is None or layout is None:
        missing = "mesh_shape" if mesh_shape is None else "layout"
        raise ValueError(
            f"mesh_shape and layout go together, but {missing} is missing: got "
            f"mesh_shape={mesh_shape!r}, layout={layout!r}."
        )
    return ReplicaAxes(mesh_shape, layout, batch_dims)


def axes_by_names(names: Sequence[str], mesh: Any = None) -> ReplicaAxes | None:
    """Returns the replica axes that split the batch dimensions `names`; None if none does.

    `mesh` is a pair of a mesh shape (`mtf.Shape`) and a layout (`mtf.LayoutRules`). If `mesh` is
    None, the mesh that the program has made in TensorFlow's default graph is taken. The result is
    then None if the program has made no mesh or several.
    """
    meshes = meshes_made() if mesh is None else [mesh]
    if len(meshes) != 1:
        return None
    (shape, layout), known = meshes[0], [mtf.Dimension(name, 1) for name in names]
    split = [layout.tensor_dimension_to_mesh_axis(dim, shape) for dim in known]
    return ReplicaAxes(shape, layout, names) if any(axis is not None for axis in split) else None


def axes_of_pipeline(
    wrapper: str, what: str, batch_dims: str | Sequence[str] = ("batch",)
) -> ReplicaAxes:
    """Returns the replica axes of the mesh that the program has made in the default graph.

    Some training programs (`mesh_tensorflow.transformer.utils.run` and the programs of T5 and
    GPT-Neo) make the mesh before the optimizer, so that a wrapper can find the mesh without
    arguments. `batch_dims` are the names of the dimensions that the batch is split along.

    Raises ValueError if there is no mesh or several. The error says that `wrapper` (a name) has to
    know `what` (words such as "the islands").
    """
    meshes = meshes_made()
    if len(meshes) == 1:
        return ReplicaAxes(*meshes[0], batch_dims)
    found = "; ".join(f"{shape.to_string} with {layout}" for shape, layout in meshes)
    raise ValueError(
        f"{wrapper} has to know {what} when the graph is built, and "
        + (f"the program has made several meshes ({found})" if found else "there is no mesh yet")
        + ": give mesh_shape and layout (or axes)."
    )


def is_simd(mesh_impl: Any) -> bool:
    """Returns whether an `mtf.MeshImpl` is of a SIMD mesh, as on a TPU.

    On a SIMD mesh one program runs on all processors, and a `LaidOutTensor` has a single slice.
    """
    return isinstance(mesh_impl, mtf.simd_mesh_impl.SimdMeshImpl)


class ProcessorGroups:
    """Groups of equal size that together have each processor of a mesh once.

    Attributes:
      groups: lists of logical processor numbers; each processor is in one list.
      mesh_axes: the mesh axes that the groups run along, or None for groups that no set of axes
        describes.
    """

    def __init__(self, groups: Sequence[Sequence[int]], mesh_axes: Sequence[int] | None = None):
        """Sets the groups.

        Args:
          groups: lists of processor numbers, all of one length. Each number from 0 on is in one of
            the lists, once.
          mesh_axes: the numbers of the mesh axes that the groups run along; None if that is not
            known.

        Raises:
          ValueError: `groups` is anything other than such lists of processor numbers.
        """
        try:
            self.groups: list[list[int]] = [list(group) for group in groups]
            members = sorted(processor for group in self.groups for processor in group)
        except TypeError:
            self.groups, members = [], []
        if (
            members != list(range(len(members)))
            or not members
            or len({len(group) for group in self.groups}) > 1
        ):
            raise ValueError(
                "groups must be equally long lists of processor numbers, in which each number from "
                f"0 on is given once, such as [[0, 1], [2, 3]], got {groups!r}."
            )
        self.mesh_axes: tuple[int, ...] | None = (
            None if mesh_axes is None else tuple(sorted(mesh_axes))
        )

    @classmethod
    def along(cls, mesh_impl: Any, mesh_axes: Sequence[int | str]) -> ProcessorGroups:
        """Returns groups of the processors that differ only in their coordinates along mesh_axes.

        Args:
          mesh_impl: an `mtf.MeshImpl`.
          mesh_axes: mesh dimensions by number or name.

        Raises:
          ValueError: the mesh lacks one of the dimensions `mesh_axes`.
        """
        axes = sorted({axis_number(mesh_impl.shape, axis, "mesh_axes") for axis in mesh_axes})
        return cls(mtf.processor_groups(mesh_impl.shape, axes), axes)

    @property
    def group_size(self) -> int:
        """The number of processors in a group."""
        return len(self.groups[0])


def check_mesh(mesh_impl: Any) -> None:
    """Raises TypeError unless mesh_impl is an `mtf.MeshImpl`."""
    if not isinstance(mesh_impl, mtf.MeshImpl):
        raise TypeError(
            "mesh_impl must be an mtf.MeshImpl, such as gs.placement_mesh_impl(...) makes, got "
            f"{mesh_impl!r}."
        )


def check_groups(mesh_impl: Any, groups: Any) -> None:
    """Raises an error unless `groups` are `ProcessorGroups` of all processors of a mesh.

    The error is a TypeError if `groups` is of another type, and a ValueError if the groups are not
    made of the processors of this mesh.
    """
    check_mesh(mesh_impl)
    if not isinstance(groups, ProcessorGroups):
        raise TypeError(
            "groups must be ProcessorGroups, such as ProcessorGroups.along(mesh_impl, [0]) makes, "
            f"got {groups!r}."
        )
    size = sum(map(len, groups.groups))
    if size != mesh_impl.size:
        raise ValueError(
            f"groups must hold the {mesh_impl.size} processors of the mesh "
            f"{mesh_impl.shape.to_string}, got {size} in {groups.groups}."
        )


def axis_number(shape: mtf.Shape, axis: Any, argument: str) -> int:
    """Returns the number of a dimension of a mesh of shape `shape`, given by name or by number.

    Raises a ValueError if `axis` is neither a name nor a number of a dimension of the mesh.
    `argument` is the name by which the error calls `axis`.
    """
    names = shape.dimension_names
    if axis in names:
        return names.index(axis)
    if isinstance(axis, int) and not isinstance(axis, bool) and 0 <= axis < shape.ndims:
        return axis
    raise ValueError(
        f"{argument} must be dimensions of the mesh {shape.to_string} by name, or by number from "
        f"0 to {shape.ndims - 1}, got {axis!r}."
    )
