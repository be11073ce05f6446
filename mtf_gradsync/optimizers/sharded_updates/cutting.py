"""Which dimensions of a variable are cut over the replica axes."""

from __future__ import annotations

import math
from typing import Collection, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.mesh.axes import ReplicaAxes

# Rows and columns that a TPU pads matrices to.
_TILE = (8, 128)


def shape_of_part(
    shape: mtf.Shape, axes: ReplicaAxes, kept: Collection[str] = (), min_size: int = 0
) -> mtf.Shape:
    """The shape of a variable whose processors hold parts.

    For each replica axis that the variable is not split over, the first dimension that can be cut
    gets the name of the shard dim, by which the layout splits it over that axis. First, because
    parts along the first dimension lie in one piece of memory. Sizes and order stay.

    Args:
      shape: of the variable.
      axes: the replica axes.
      kept: names of dimensions that have to keep their names.
      min_size: variables of fewer elements are not cut.

    Returns:
      The shape; the same one where nothing can be cut.
    """
    if shape.size < min_size:
        return shape
    dims = list(shape.dims)
    layout = axes.layout.tensor_layout(shape, axes.mesh_shape)
    is_free = [layout[i] is None and d.name not in kept for i, d in enumerate(dims)]
    for shard_dim in sorted(axes.free_shard_dims(shape), key=lambda d: -d.size):
        for number, dim in enumerate(dims):
            if is_free[number] and shard_dim.size > 1 and dim.size % shard_dim.size == 0:
                dims[number] = mtf.Dimension(shard_dim.name, dim.size)
                is_free[number] = False
                break
    return mtf.Shape(dims)


def fills_tiles(whole: Sequence[int], part: Sequence[int]) -> bool:
    """Whether the parts of a matrix fill most of the tiles that a TPU pads them to.

    A TPU stores the last two dimensions in tiles of 8 x 128 numbers, with that dimension last that
    takes the fewest tiles. Parts that fill few of them are as large in memory as the whole, and the
    compiler copies the whole to another layout and back.

    Args:
      whole: shape of a core's slice of the variable.
      part: shape of its part.

    Returns:
      Whether all parts together take less than twice the tiles of the whole; true for a vector.
    """
    if len(whole) < 2:
        return True
    swapped = _in_tiles(whole, True) < _in_tiles(whole, False)
    parts = math.prod(whole) // math.prod(part)
    return parts * _in_tiles(part, swapped) < 2 * _in_tiles(whole, swapped)


def _in_tiles(shape: Sequence[int], swapped: bool) -> int:
    """The number of tiles for a slice; swapped: with its last two dimensions exchanged."""
    *others, rows, columns = shape
    if swapped:
        rows, columns = columns, rows
    return math.prod(others) * math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])


class Splitting(NamedTuple):
    """How a dimension that is split over one mesh axis is split over the replica axes as well.

    Attributes:
      apart: the shape with the dimension as several ones: that of the mesh axis, of its size; one
        for each replica axis, that nothing splits; the rest. A reshape moves nothing.
      part: the same, with the names of the shard dims.
    """

    apart: mtf.Shape
    part: mtf.Shape


def split_twice(shape: mtf.Shape, axes: ReplicaAxes, min_size: int = 0) -> Splitting | None:
    """Splits the first dimension that can be over the replica axes and its own mesh axis.

    Mesh-TF splits a dimension over one mesh axis only, so that it takes several. A variable that
    an optimizer reads the shape of cannot have them; a slot that is gathered for the update can.

    Args:
      shape: of the slot.
      axes: the replica axes.
      min_size: slots of fewer elements are not split.

    Returns:
      The shapes, None where no dimension can be split so.
    """
    free = [d for d in axes.free_shard_dims(shape) if d.size > 1]
    if not free or shape.size < min_size:
        return None
    layout = axes.layout.tensor_layout(shape, axes.mesh_shape)
    for number, dim in enumerate(shape.dims):
        if layout[number] is None:
            continue
        split = axes.mesh_shape.dims[layout[number]].size
        rest, left = divmod(dim.size, split * mtf.Shape(free).size)
        if left:
            continue
        before, after = shape.dims[:number], shape.dims[number + 1 :]
        own, end = mtf.Dimension(dim.name, split), mtf.Dimension(f"{dim.name}_rest", rest)
        whole = [mtf.Dimension(f"{dim.name}_{d.name}", d.size) for d in free]
        return Splitting(
            mtf.Shape([*before, own, *whole, end, *after]),
            mtf.Shape([*before, own, *free, end, *after]),
        )
    return None


def why_whole(
    shape: mtf.Shape, axes: ReplicaAxes, kept: Collection[str] = (), min_size: int = 0
) -> str:
    """Why a variable is not cut, for people to read."""
    if not shape.dims:
        return "is a scalar"
    free = [d for d in axes.free_shard_dims(shape) if d.size > 1]
    if not free:
        return "is split over the replica axes already"
    if shape.size < min_size:
        return f"has fewer than {min_size} elements"
    sizes = " or ".join(str(d.size) for d in free)
    layout = axes.layout.tensor_layout(shape, axes.mesh_shape)
    if all(layout[i] is not None for i in range(len(shape.dims))):
        return "has no dimension that is not split already"
    names = [d.name for i, d in enumerate(shape.dims) if layout[i] is None and d.name in kept]
    also = f", and the optimizer knows {names} by name" if names else ""
    return f"has no dimension left that {sizes} divides{also}"
