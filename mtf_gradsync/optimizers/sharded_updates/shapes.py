"""The dimensions along which variables and slots are split over the replica axes."""

from __future__ import annotations

import itertools
import math
from typing import Collection, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.mesh.axes import ReplicaAxes

# Rows and columns of the tiles in which a TPU stores the last two dimensions of its layout.
_TILE = (8, 128)


def shape_of_part(
    shape: mtf.Shape, axes: ReplicaAxes, fixed_dims: Collection[str] = (), min_size: int = 0
) -> mtf.Shape:
    """Returns a variable's shape with dimensions renamed so that the layout splits them.

    For each replica axis that the layout does not split the variable over, one dimension takes the
    name of the shard dim. Of the unsplit dimensions whose sizes the axis divides it is the one of
    which a part takes the fewest of a TPU's tiles; of several the first, because parts along the
    first dimension are contiguous in memory. Sizes and order do not change.

    A variable of fewer elements than `min_size`, or without such a dimension, keeps its shape, and
    dimensions with a name in `fixed_dims` keep their name.
    """
    if shape.size < min_size:
        return shape
    full, dims = axes.slice_shape(shape), list(shape.dims)
    layout = axes.layout.tensor_layout(shape, axes.mesh_shape)
    is_free = [layout[i] is None and d.name not in fixed_dims for i, d in enumerate(dims)]
    for shard_dim in sorted(axes.free_shard_dims(shape), key=lambda d: -d.size):
        parts = {
            number: [*dims[:number], mtf.Dimension(shard_dim.name, dim.size), *dims[number + 1 :]]
            for number, dim in enumerate(dims)
            if is_free[number] and shard_dim.size > 1 and dim.size % shard_dim.size == 0
        }
        if parts:
            sizes = {n: axes.slice_shape(mtf.Shape(part)) for n, part in parts.items()}
            number = min(parts, key=lambda n: tiles(full, sizes[n])[1])
            dims, is_free[number] = parts[number], False
    return mtf.Shape(dims)


def saves_tiles(full: Sequence[int], part: Sequence[int]) -> bool:
    """Returns whether a part saves more than two thirds of what parts without padding would save.

    Counted are a TPU's tiles; both are shapes on one core: of its slice of a variable, and of its
    part of that. If a part fills few of its tiles, it takes about as much memory and time as the
    full slice, and the compiler copies the slice to another layout and back.
    """
    of_full, of_part = tiles(full, part)
    numbers, numbers_of_part = math.prod(full), math.prod(part)
    # In whole numbers: (of_full - of_part) / of_full > 2/3 * (1 - numbers_of_part / numbers)
    return 3 * (of_full - of_part) * numbers > 2 * of_full * (numbers - numbers_of_part)


def tiles(full: Sequence[int], part: Sequence[int]) -> tuple[int, int]:
    """Returns how many of a TPU's tiles a tensor and a part of it take, in the tensor's layout.

    A TPU stores two of the dimensions in tiles of 8 x 128 numbers: the last two, unless others take
    fewer tiles. Vectors are counted in numbers.
    """
    if len(full) < 2:
        return math.prod(full), math.prod(part)
    numbers = reversed(range(len(full)))
    in_layout = min(
        itertools.permutations(numbers, 2), key=lambda columns_rows: _count(full, *columns_rows)
    )
    return _count(full, *in_layout), _count(part, *in_layout)


def _count(sizes: Sequence[int], columns: int, rows: int) -> int:
    """Returns the number of tiles of a tensor with two of its dimensions in tiles."""
    others = math.prod(sizes) // (sizes[columns] * sizes[rows])
    return others * math.ceil(sizes[rows] / _TILE[0]) * math.ceil(sizes[columns] / _TILE[1])


class SlotShapes(NamedTuple):
    """Two shapes of a slot in which one dimension is replaced by several smaller ones.

    The first of them has the size of the mesh axis that splits the dimension, and is split over it;
    then there is one for each replica axis; the last has the remaining size. Reshaping the slot to
    this shape moves no data. In `full` nothing splits the dimensions for the replica axes; in
    `part` they have the names of the shard dims, so that the layout splits them.
    """

    full: mtf.Shape
    part: mtf.Shape


def slot_shapes(shape: mtf.Shape, axes: ReplicaAxes, min_size: int = 0) -> SlotShapes | None:
    """Returns shapes that split a dimension over the replica axes and over its own mesh axis.

    Mesh-TF splits a dimension over one mesh axis only, so that several dimensions have to take its
    place. A variable cannot be reshaped like this, because optimizers read its shape; a slot that
    is gathered for the update can. It is the first dimension that can be split like this; the
    result is None if there is none, or the slot has fewer elements than `min_size`.
    """
    free = [d for d in axes.free_shard_dims(shape) if d.size > 1]
    if not free or shape.size < min_size:
        return None
    layout = axes.layout.tensor_layout(shape, axes.mesh_shape)
    for number, dim in enumerate(shape.dims):
        if layout[number] is None:
            continue
        axis_size = axes.mesh_shape.dims[layout[number]].size
        rest, remainder = divmod(dim.size, axis_size * mtf.Shape(free).size)
        if remainder:
            continue
        before, after = shape.dims[:number], shape.dims[number + 1 :]
        first, last = mtf.Dimension(dim.name, axis_size), mtf.Dimension(f"{dim.name}_rest", rest)
        unsplit = [mtf.Dimension(f"{dim.name}_{d.name}", d.size) for d in free]
        return SlotShapes(
            mtf.Shape([*before, first, *unsplit, last, *after]),
            mtf.Shape([*before, first, *free, last, *after]),
        )
    return None


def why_unsplit(
    shape: mtf.Shape, axes: ReplicaAxes, fixed_dims: Collection[str] = (), min_size: int = 0
) -> str:
    """Returns why `shape_of_part` does not split a variable, in words to put after its name."""
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
    names = [d.name for i, d in enumerate(shape.dims) if layout[i] is None and d.name in fixed_dims]
    also = f", and the optimizer knows {names} by name" if names else ""
    return f"has no unsplit dimension that {sizes} divides{also}"
