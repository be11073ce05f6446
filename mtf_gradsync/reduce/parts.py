"""Cuts tensors into parts, one for each processor along axes of the mesh, and joins parts."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.axes import ProcessorGroups, is_simd
from mtf_gradsync.mesh.devices import memories
from mtf_gradsync.reduce.sums import plan_buckets


class Cut(NamedTuple):
    """A cut of a tensor: the number of one of its axes, and of the mesh axis that splits it."""

    mesh_axis: int
    tensor_axis: int


#: The cuts of one tensor, sorted; no two share a mesh axis or an axis of the tensor.
Cuts = Sequence[Cut]


def mesh_axes_of(cuts: Cuts) -> tuple[int, ...]:
    """Returns the sorted numbers of the mesh axes that a tensor is cut along."""
    return tuple(sorted(cut.mesh_axis for cut in cuts))


def part_shape(mesh_impl: Any, shape: Sequence[int], cuts: Cuts) -> list[int]:
    """Returns the shape of one part of a slice of shape `shape`."""
    result = list(shape)
    for axis, tensor_axis in cuts:
        result[tensor_axis] //= mesh_impl.shape.dims[axis].size
    return result


def take_parts(mesh_impl: Any, value: Any, cuts: Cuts) -> Any:
    """Returns each processor's part of a value.

    All processors along the mesh axes of the cuts hold the same value.
    """
    if not cuts:
        return value
    if is_simd(mesh_impl):
        for mesh_axis, tensor_axis in cuts:
            value = mesh_impl.allsplit(value, mesh_axis, tensor_axis)
        return value
    # A slice that processors share is cut once, on the device that holds it.
    slices = value.tensor_list
    holders: dict[int, list[int]] = collections.defaultdict(list)
    for processor, x in enumerate(slices):
        holders[id(x)].append(processor)
    result: list[Any] = [None] * len(slices)
    for processors in holders.values():
        wanted = {p: part_number(mesh_impl, cuts, p) for p in processors}
        if len(set(wanted.values())) == 1:
            parts = {next(iter(wanted.values())): _slice(mesh_impl, value, cuts, processors[0])}
        else:
            with tf.device(slices[processors[0]].device):
                parts = dict(enumerate(all_parts(mesh_impl, slices[processors[0]], cuts)))
        for p in processors:
            result[p] = parts[wanted[p]]
    return mesh_impl.LaidOutTensor(result)


def all_parts(mesh_impl: Any, tensor: tf.Tensor, cuts: Cuts) -> list[tf.Tensor]:
    """Returns all parts of one slice, in the order of `part_number`."""
    parts = [tensor]
    for mesh_axis, tensor_axis in sorted(cuts):
        size = mesh_impl.shape.dims[mesh_axis].size
        parts = [piece for x in parts for piece in tf.split(x, size, tensor_axis)]
    return parts


def joined(mesh_impl: Any, parts: Sequence[tf.Tensor], cuts: Cuts) -> tf.Tensor:
    """Returns the whole slice, given the parts that `all_parts` returned for it."""
    pieces = list(parts)
    for mesh_axis, tensor_axis in sorted(cuts, reverse=True):
        size = mesh_impl.shape.dims[mesh_axis].size
        pieces = [tf.concat(pieces[i : i + size], tensor_axis) for i in range(0, len(pieces), size)]
    return pieces[0]


def part_number(mesh_impl: Any, cuts: Cuts, processor: int) -> int:
    """Returns the number of a processor's part: row-major along the sorted mesh axes."""
    coordinates = mtf.pnum_to_processor_coordinates(mesh_impl.shape, processor)
    number = 0
    for axis in mesh_axes_of(cuts):
        number = number * mesh_impl.shape.dims[axis].size + coordinates[axis]
    return number


def slice_groups(mesh_impl: Any, cuts: Cuts) -> ProcessorGroups:
    """Returns the groups of processors that together hold all parts of one slice.

    The members of a group are in the order of `part_number`.
    """
    return ProcessorGroups.along(mesh_impl, mesh_axes_of(cuts))


def one_memory(mesh_impl: Any) -> bool:
    """Returns whether all devices of a placement mesh share a memory."""
    return len(memories(mesh_impl.devices)) == 1


def _slice(mesh_impl: Any, value: Any, cuts: Cuts, processor: int) -> tf.Tensor:
    """Returns one processor's part of its slice of a value."""
    x = value.tensor_list[processor]
    coordinates = mtf.pnum_to_processor_coordinates(mesh_impl.shape, processor)
    size = part_shape(mesh_impl, x.shape.as_list(), cuts)
    begin = [0] * len(size)
    for mesh_axis, tensor_axis in cuts:
        begin[tensor_axis] = size[tensor_axis] * coordinates[mesh_axis]
    with tf.device(mesh_impl.devices[processor]):
        return tf.slice(x, begin, size)


def buckets(tensors: Sequence[Any], cuts: Sequence[Cuts], bucket_bytes: int) -> list[list[int]]:
    """Returns the positions of the tensors in each bucket.

    The tensors of a bucket have one dtype, and are cut along the same mesh axes. A bucket of
    several tensors has at most bucket_bytes on each processor.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, tensor in enumerate(tensors):
        dtype = tensor.tensor_list[0].dtype.base_dtype
        alike.setdefault((mesh_axes_of(cuts[index]), dtype), []).append(index)
    found = []
    for (_, dtype), indices in alike.items():
        num_bytes = [mtf.list_product(tensors[i].slice_shape) * dtype.size for i in indices]
        for bucket in plan_buckets(num_bytes, bucket_bytes):
            found.append([indices[i] for i in bucket])
    return found


def to_rows(mesh_impl: Any, x: tf.Tensor, cuts: Cuts) -> tf.Tensor:
    """Returns a slice as a matrix with one row for each part, in the order of `part_number`."""
    split, order = _split_axes(mesh_impl, x.shape.as_list(), cuts)
    parts = mtf.list_product([split[i] for i in order[: len(cuts)]])
    return tf.reshape(_transposed(tf.reshape(x, split), order), [parts, -1])


def from_rows(mesh_impl: Any, rows: tf.Tensor, shape: Sequence[int], cuts: Cuts) -> tf.Tensor:
    """Returns the slice of shape `shape` that `to_rows` turned into `rows`."""
    split, order = _split_axes(mesh_impl, shape, cuts)
    x = tf.reshape(rows, [split[i] for i in order])
    return tf.reshape(_transposed(x, [order.index(i) for i in range(len(order))]), list(shape))


def _split_axes(mesh_impl: Any, shape: Sequence[int], cuts: Cuts) -> tuple[list[int], list[int]]:
    """Returns a shape in which each axis that is cut is two axes, and an order of its axes.

    The first of the two numbers the parts. The order has these axes first.
    """
    mesh_axis = {cut.tensor_axis: cut.mesh_axis for cut in cuts}
    split: list[int] = []
    part_axis: dict[int, int] = {}  # mesh axis -> the axis that numbers parts along it
    for axis, size in enumerate(shape):
        if axis in mesh_axis:
            part_axis[mesh_axis[axis]] = len(split)
            parts = mesh_impl.shape.dims[mesh_axis[axis]].size
            split += [parts, size // parts]
        else:
            split.append(size)
    first = [part_axis[cut.mesh_axis] for cut in sorted(cuts)]
    return split, first + [i for i in range(len(split)) if i not in first]


def _transposed(x: tf.Tensor, order: list[int]) -> tf.Tensor:
    return x if order == sorted(order) else tf.transpose(x, order)
