"""Parts of tensors, one for each processor along axes of the mesh: reduce-scatters, all-gathers."""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple, Sequence

from mtf_gradsync._common import grouped, map_by_key
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import (
    PASSES_ON,
    cross_replica_gather,
    cross_replica_scatter,
    set_attr,
    summed_together,
)
from mtf_gradsync.mesh.axes import ProcessorGroups, is_simd
from mtf_gradsync.mesh.devices import memories
from mtf_gradsync.reduce.sums import (
    pack,
    physical_groups,
    plan_buckets,
    simd_all_reduce,
    simd_wire_dtype,
    sum_on_one_device,
    unpack,
)


class Cut(NamedTuple):
    """An axis of a tensor that is split into equal parts, and the mesh axis that it is split over.

    Both axes are given by their numbers.
    """

    mesh_axis: int
    tensor_axis: int


#: The cuts of one tensor, sorted; no two share a mesh axis or an axis of the tensor.
Cuts = Sequence[Cut]


def mesh_axes_of(cuts: Cuts) -> tuple[int, ...]:
    """Returns the sorted numbers of the mesh axes over which `cuts` split a tensor."""
    return tuple(sorted(cut.mesh_axis for cut in cuts))


def part_shape(mesh_impl: Any, shape: Sequence[int], cuts: Cuts) -> list[int]:
    """Returns the shape of each part of a slice that has the shape `shape`.

    `cuts` says which axes of the slice are split, and over which mesh axes. The size of a split
    axis is divided by the size of its mesh axis.
    """
    result = list(shape)
    for axis, tensor_axis in cuts:
        result[tensor_axis] //= mesh_impl.shape.dims[axis].size
    return result


def take_parts(mesh_impl: Any, value: Any, cuts: Cuts) -> Any:
    """Returns a `LaidOutTensor` of each processor's part of its slice of `value`.

    `value` is a `LaidOutTensor`. `cuts` says which axes of its slices are split, and over which
    mesh axes; processors that differ only along these mesh axes must hold equal slices. If `cuts`
    is empty, `value` itself is returned.
    """
    if not cuts:
        return value
    if is_simd(mesh_impl):
        for mesh_axis, tensor_axis in cuts:
            value = mesh_impl.allsplit(value, mesh_axis, tensor_axis)
        return value
    # A slice that processors share is cut once, on the device that holds it.
    slices = value.tensor_list

    def cut(_: int, processors: list[int]) -> list[tf.Tensor]:
        numbers = [part_number(mesh_impl, cuts, p) for p in processors]
        if len(set(numbers)) == 1:
            return [_take_part(mesh_impl, value, cuts, processors[0])] * len(processors)
        x = slices[processors[0]]
        with tf.device(x.device):
            parts = split_into_parts(mesh_impl, x, cuts)
        return [parts[number] for number in numbers]

    return mesh_impl.LaidOutTensor(map_by_key([id(x) for x in slices], cut))


def split_into_parts(mesh_impl: Any, tensor: tf.Tensor, cuts: Cuts) -> list[tf.Tensor]:
    """Returns all parts of one slice, in the order of `part_number`.

    `tensor` is the whole slice. `cuts` says which axes of it are split, and over which mesh axes.
    """
    parts = [tensor]
    for mesh_axis, tensor_axis in sorted(cuts):
        size = mesh_impl.shape.dims[mesh_axis].size
        parts = [piece for x in parts for piece in tf.split(x, size, tensor_axis)]
    return parts


def join_parts(mesh_impl: Any, parts: Sequence[tf.Tensor], cuts: Cuts) -> tf.Tensor:
    """Returns the slice that `split_into_parts` has split into `parts`, with the same `cuts`."""
    pieces = list(parts)
    for mesh_axis, tensor_axis in sorted(cuts, reverse=True):
        size = mesh_impl.shape.dims[mesh_axis].size
        pieces = [tf.concat(pieces[i : i + size], tensor_axis) for i in range(0, len(pieces), size)]
    return pieces[0]


def part_number(mesh_impl: Any, cuts: Cuts, processor: int) -> int:
    """Returns the number, from 0 on, of the part of a slice that the processor `processor` holds.

    `cuts` says over which mesh axes the slice is split. A processor's coordinates along these axes
    give the number in row-major order: if the axes have the sizes 4 and 2, the processor with the
    coordinates (1, 0) holds part 2.
    """
    coordinates = mtf.pnum_to_processor_coordinates(mesh_impl.shape, processor)
    number = 0
    for axis in mesh_axes_of(cuts):
        number = number * mesh_impl.shape.dims[axis].size + coordinates[axis]
    return number


def slice_groups(mesh_impl: Any, cuts: Cuts) -> ProcessorGroups:
    """Returns the groups of processors that together hold all parts of one slice.

    `cuts` says over which mesh axes slices are split. The members of a group are in the order of
    `part_number`.
    """
    return ProcessorGroups.along(mesh_impl, mesh_axes_of(cuts))


def share_one_memory(mesh_impl: Any) -> bool:
    """Returns whether all devices of a placement mesh share a memory."""
    return len(memories(mesh_impl.devices)) == 1


def _take_part(mesh_impl: Any, value: Any, cuts: Cuts, processor: int) -> tf.Tensor:
    """Returns one processor's part of its slice of the `LaidOutTensor` `value`, as a tf tensor.

    `cuts` says which axes of slices are split, and over which mesh axes.
    """
    x = value.tensor_list[processor]
    coordinates = mtf.pnum_to_processor_coordinates(mesh_impl.shape, processor)
    size = part_shape(mesh_impl, x.shape.as_list(), cuts)
    begin = [0] * len(size)
    for mesh_axis, tensor_axis in cuts:
        begin[tensor_axis] = size[tensor_axis] * coordinates[mesh_axis]
    with tf.device(mesh_impl.devices[processor]):
        return tf.slice(x, begin, size)


def buckets(tensors: Sequence[Any], cuts: Sequence[Cuts], bucket_bytes: int) -> list[list[int]]:
    """Returns a list for each bucket: the positions in `tensors` of the bucket's tensors.

    The tensors of a bucket are sent in one message. They have one dtype, and are split over the
    same mesh axes.

    Args:
      tensors: `LaidOutTensor`s.
      cuts: for each tensor, which of its axes are split, and over which mesh axes.
      bucket_bytes: the largest size of a bucket of several tensors, in bytes per processor; 0 makes
        a bucket for each tensor.
    """
    dtypes = [x.tensor_list[0].dtype.base_dtype for x in tensors]
    keys = [(mesh_axes_of(cut), dtype) for cut, dtype in zip(cuts, dtypes)]
    alike = grouped(range(len(tensors)), keys)
    found = []
    for (_, dtype), indices in alike.items():
        num_bytes = [mtf.list_product(tensors[i].slice_shape) * dtype.size for i in indices]
        found += [[indices[i] for i in some] for some in plan_buckets(num_bytes, bucket_bytes)]
    return found


def join_rows(mesh_impl: Any, rows: tf.Tensor, shape: Sequence[int], cuts: Cuts) -> tf.Tensor:
    """Returns a slice of the shape `shape`, put together from parts that are the rows of a matrix.

    `rows` is the matrix: each row has the elements of a part in row-major order, and the rows are
    in the order of `part_number`. `cuts` says which axes of the slice are split, and over which
    mesh axes.
    """
    split, order = _split_axes(mesh_impl, shape, cuts)
    x = tf.reshape(rows, [split[i] for i in order])
    return tf.reshape(_transposed(x, [order.index(i) for i in range(len(order))]), list(shape))


def _split_axes(mesh_impl: Any, shape: Sequence[int], cuts: Cuts) -> tuple[list[int], list[int]]:
    """Returns `shape` with two axes in place of each split axis, and an order of the new axes.

    `cuts` says which axes are split, and over which mesh axes. The first of the two axes numbers
    the parts, and the second one has the size of a part. The order is a list of all new axes:
    first those that number parts, sorted by mesh axis, and then all others. If axis 1 of the shape
    [4, 6] is split over a mesh axis of size 2, the result is ([4, 2, 3], [1, 0, 2]).
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


# A tile of a TPU's memory: 8 sublanes of 128 lanes. Smaller parts share an all-gather.
_TILE = 8 * 128
# Smaller parts share a reduce-scatter. The compiler merges neighbouring ones of small tensors by
# itself, and a packed one holds all gradients twice.
_SCATTERED_ALONE = _TILE // 2
# Among many cores a collective takes longer to begin: there, smaller parts share both.
_ALONE_AMONG_MANY = 4 * _TILE
# The TPU compiler does not gather a tensor into a variable's memory. If the tensor is a variable's
# new value, the variable is copied when the step begins, and the new value when the step ends. An
# operation after the gather, which writes into the variable's memory, saves the copies. For tensors
# of fewer numbers than this, the operation takes more time than the copies.
_WRITTEN_IN_PLACE = 64 * 1024


# The TPU compiler (libtpu 0.0.17) turns a reduce-scatter over all cores of a square slice, such as
# v5e:4x4, into an all-reduce and a slice, which sends twice the bytes. It keeps reduce-scatters
# over halves of a slice. On v5e:2x4 it keeps both, and one of all 8 cores takes less time.
_SCATTERED_AT_ONCE = 8


class _ReduceScatter(NamedTuple):
    """A reduce-scatter: it sums tensors over groups of cores, and splits the sums among them.

    A core gets its part of a sum by one reduce-scatter or by several, which run one after the
    other, each on the results of the one before.

    Attributes:
      groups: the groups of cores that sum with each other.
      axis: the axis of the tensor that is split among the cores of a group.
      blocks: the number of equal blocks into which the axis is divided first. Each block is then
        split among the cores.
    """

    groups: ProcessorGroups
    axis: int
    blocks: int = 1


def _plan_reduce_scatters(mesh_impl: Any, cuts: Cuts) -> list[_ReduceScatter]:
    """Returns the reduce-scatters that give each core its part of a sum, in their order.

    `cuts` has a pair for each axis of the tensor that is split: this axis, and the mesh axis over
    which it is split. There is one reduce-scatter for each pair, with one exception. If there is a
    single pair, and its mesh axis has all cores of the mesh, an even number above
    `_SCATTERED_AT_ONCE`, there are two reduce-scatters. On TPUs the two send fewer bytes than one
    would.
    """
    if len(cuts) > 1:
        each = [
            _ReduceScatter(slice_groups(mesh_impl, [cut]), cut.tensor_axis)
            for cut in reversed(cuts)
        ]
        # What the first of them cuts, the others need not send.
        return sorted(each, key=lambda one: -one.groups.group_size)
    along, axis = slice_groups(mesh_impl, cuts), cuts[0].tensor_axis
    half, is_odd = divmod(along.group_size, 2)
    if len(along.groups) > 1 or is_odd or along.group_size <= _SCATTERED_AT_ONCE:
        return [_ReduceScatter(along, axis)]
    # Within each half of the cores, both halves of the sum; then between the halves.
    (cores,) = along.groups
    pairs = ProcessorGroups(list(zip(cores[:half], cores[half:])))
    return [
        _ReduceScatter(ProcessorGroups([cores[:half], cores[half:]]), axis, blocks=2),
        _ReduceScatter(pairs, axis),
    ]


def simd_reduce_scatter(
    mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, cuts: Sequence[Cuts]
) -> list[Any]:
    """Returns each core's part of the sums of `values` over `groups` on a SIMD mesh.

    `values` and the results are `LaidOutTensor`s. `cuts` says, for each value, which axes are
    split, and over which mesh axes. Sums that do not depend on each other are marked as one group
    of sums, which the compiler may combine.
    """
    shapes = [part_shape(mesh_impl, v.slice_shape, c) for v, c in zip(values, cuts)]
    sharing = _group_by_collective(mesh_impl, values, shapes, cuts, _SCATTERED_ALONE)
    planned = [_plan_reduce_scatters(mesh_impl, cuts[members[0]]) for members in sharing]
    scattered = [
        _stack_to_send(mesh_impl, [values[i] for i in members], cuts[members[0]])
        for members in sharing
    ]
    for turn in range(max(map(len, planned), default=0)):
        with summed_together():
            for number, one in enumerate(planned):
                if turn < len(one):
                    is_stacked = len(sharing[number]) > 1
                    scattered[number] = _run_reduce_scatter(
                        mesh_impl, scattered[number], one[turn], is_stacked
                    )
    assert groups.mesh_axes is not None  # the groups run along axes
    # A part is summed over the axes along which its tensor is not cut.
    rests = []
    for number, members in enumerate(sharing):
        dtype = values[members[0]].tensor_list[0].dtype
        scattered[number] = _cast(mesh_impl, scattered[number], dtype)
        cut = mesh_axes_of(cuts[members[0]])
        rests.append(tuple(axis for axis in groups.mesh_axes if axis not in cut))

    def sum_over(rest: tuple[int, ...], numbers: list[int]) -> list[Any]:
        some = [scattered[number] for number in numbers]
        along = ProcessorGroups.along(mesh_impl, rest)
        return simd_all_reduce(mesh_impl, some, along) if rest else some

    results: dict[int, Any] = {}
    for members, parts in zip(sharing, map_by_key(rests, sum_over)):
        several = len(members) > 1
        own = mesh_impl.slicewise(lambda x: tuple(tf.unstack(x)), parts) if several else [parts]
        results.update(zip(members, own))
    return [results[i] for i in range(len(values))]


def simd_all_gather(mesh_impl: Any, parts: Sequence[Any], cuts: Sequence[Cuts]) -> list[Any]:
    """Returns whole slices on each core of a SIMD mesh, gathered from the parts on all cores.

    `parts` are `LaidOutTensor`s of each core's part. `cuts` says, for each of them, which axes of
    the whole slice are split, and over which mesh axes. The all-gathers are marked as made
    together, so that the compiler may combine them.
    """
    results: dict[int, Any] = {}
    with summed_together():
        part_shapes = [p.slice_shape for p in parts]
        for members in _group_by_collective(mesh_impl, parts, part_shapes, cuts, _TILE):
            slices = _gathered(mesh_impl, [parts[i] for i in members], cuts[members[0]])
            results.update(zip(members, slices))
    return [results[i] for i in range(len(parts))]


def _group_by_collective(
    mesh_impl: Any,
    tensors: Sequence[Any],
    part_shapes: Sequence[Sequence[int]],
    cuts: Sequence[Cuts],
    least: int,
) -> list[list[int]]:
    """Returns, for each collective, the list of positions in `tensors` of the tensors it sends.

    Small tensors share a collective if they have the same dtype, shape of parts and `cuts`. Each
    large tensor has its own collective.

    Args:
      mesh_impl: the SIMD mesh.
      tensors: `LaidOutTensor`s.
      part_shapes: the shape of a core's part of each tensor.
      cuts: for each tensor, which of its axes are split, and over which mesh axes.
      least: the number of elements from which on a part counts as large. If a tensor is split among
        more than `_SCATTERED_AT_ONCE` cores, `_ALONE_AMONG_MANY` is used in place of `least`.
    """

    def collective(index: int) -> tuple[Any, ...]:
        shape, dtype = part_shapes[index], tensors[index].tensor_list[0].dtype.base_dtype
        are_many = slice_groups(mesh_impl, cuts[index]).group_size > _SCATTERED_AT_ONCE
        is_large = mtf.list_product(shape) >= (_ALONE_AMONG_MANY if are_many else least)
        return index if is_large else -1, tuple(shape), tuple(cuts[index]), dtype

    positions = range(len(tensors))
    return list(grouped(positions, [collective(i) for i in positions]).values())


def _stack_to_send(mesh_impl: Any, values: Sequence[Any], cuts: Cuts) -> Any:
    """Returns `values` as one `LaidOutTensor`, in the dtype in which the SIMD mesh sends them.

    `values` are `LaidOutTensor`s of one shape. Several values are stacked along a new first axis;
    a single value is not. `cuts` says which axes of each value are split, and over which mesh axes;
    the dtype depends on the mesh axes (see `simd_wire_dtype`).
    """
    dtype = values[0].tensor_list[0].dtype
    if len(values) == 1:
        (stacked,) = values
    else:
        stacked = mesh_impl.slicewise(lambda *xs: tf.stack(xs), *values)
    wire = simd_wire_dtype(mesh_impl, dtype, slice_groups(mesh_impl, cuts))
    return _cast(mesh_impl, stacked, wire)


def _cast(mesh_impl: Any, value: Any, dtype: tf.DType) -> Any:
    if value.tensor_list[0].dtype == dtype:
        return value
    return mesh_impl.slicewise(lambda x: tf.cast(x, dtype), value)


def _run_reduce_scatter(
    mesh_impl: Any, value: Any, planned: _ReduceScatter, is_stacked: bool
) -> Any:
    """Runs the reduce-scatter `planned` on `value`; returns each core's part of the sum.

    `value` and the result are `LaidOutTensor`s. If `is_stacked` is true, the slices of `value` are
    stacks of tensors along a new first axis, which the number `planned.axis` does not count.
    """
    physical, axis = physical_groups(mesh_impl, planned.groups), planned.axis + is_stacked

    def scatter(x: tf.Tensor) -> tf.Tensor:
        if planned.blocks == 1:
            return cross_replica_scatter(x, physical, axis)
        shape = x.shape.as_list()
        before, size, after = shape[:axis], shape[axis] // planned.blocks, shape[axis + 1 :]
        blocks = tf.reshape(x, [*before, planned.blocks, size, *after])
        parts = cross_replica_scatter(blocks, physical, axis + 1)
        return tf.reshape(parts, [*before, shape[axis] // planned.groups.group_size, *after])

    return mesh_impl.slicewise(scatter, value)


def _gathered(mesh_impl: Any, parts: Sequence[Any], cuts: Cuts) -> Sequence[Any]:
    physical = physical_groups(mesh_impl, slice_groups(mesh_impl, cuts))
    by_rows = len(cuts) > 1
    shape = list(parts[0].slice_shape)
    for cut in cuts:
        shape[cut.tensor_axis] *= mesh_impl.shape.dims[cut.mesh_axis].size

    def gather(number: tf.Tensor, *xs: tf.Tensor) -> tuple[tf.Tensor, ...]:
        if by_rows:
            xs = tuple(tf.reshape(x, [1, -1]) for x in xs)
        x = tf.stack(xs) if len(xs) > 1 else xs[0]
        axis = x.shape.ndims - xs[0].shape.ndims + (0 if by_rows else cuts[0].tensor_axis)
        full = cross_replica_gather(x, physical, axis)
        pieces = tf.unstack(full) if len(xs) > 1 else [full]
        if by_rows:
            pieces = [join_rows(mesh_impl, p, shape, cuts) for p in pieces]
        if mtf.list_product(shape) >= _WRITTEN_IN_PLACE:
            # Always so, but the compiler does not know it.
            is_processor = number >= 0
            pieces = [tf.where_v2(is_processor, p, tf.zeros_like(p)) for p in pieces]
            for piece in pieces:
                set_attr(piece.op, PASSES_ON, tf.AttrValue(b=True))
        return tuple(pieces)

    return list(mesh_impl.slicewise(gather, mesh_impl.laid_out_pnum(), *parts))


# Every collective pays a latency, and the bucket bounds the extra memory.
SIMD_BUCKET_BYTES = 32 * 1024 * 1024


def reduce_scatter(
    mesh_impl: Any,
    values: Sequence[Any],
    groups: ProcessorGroups,
    cuts: Sequence[Cuts],
    bucket_bytes: int = 0,
) -> list[Any]:
    """Returns each processor's part of the sums of `values` over `groups`.

    `values` and the results are `LaidOutTensor`s. `cuts` says, for each value, which axes are
    split, and over which mesh axes. On a placement mesh values are packed into buckets of at most
    `bucket_bytes` per processor (0 packs nothing), and each processor adds up its part of every
    bucket.
    """
    if is_simd(mesh_impl):
        return simd_reduce_scatter(mesh_impl, values, groups, cuts)
    scatter = functools.partial(_scatter_on_devices, mesh_impl, groups)
    return _in_buckets(values, cuts, bucket_bytes, scatter)


def _in_buckets(
    tensors: Sequence[Any],
    cuts: Sequence[Cuts],
    bucket_bytes: int,
    make: Callable[[list[Any], list[Cuts], int], Sequence[Any]],
) -> list[Any]:
    """Calls `make` with the tensors, the cuts and the number of each bucket; joins the results."""
    results: dict[int, Any] = {}
    for turn, members in enumerate(buckets(tensors, cuts, bucket_bytes)):
        made = make([tensors[i] for i in members], [cuts[i] for i in members], turn)
        results.update(zip(members, made))
    return [results[i] for i in range(len(tensors))]


def _scatter_on_devices(
    mesh_impl: Any,
    groups: ProcessorGroups,
    values: Sequence[Any],
    cuts: Sequence[Cuts],
    turn: int,
) -> list[Any]:
    shapes = [part_shape(mesh_impl, v.slice_shape, c) for v, c in zip(values, cuts)]
    results: dict[int, Sequence[tf.Tensor]] = {}
    for group in groups.groups:
        packs = {}
        for processor in group:
            # Each value is cut on the device that holds it, so that only parts are sent.
            with tf.device(mesh_impl.devices[processor]):
                pieces = [
                    split_into_parts(mesh_impl, v.tensor_list[processor], c)
                    for v, c in zip(values, cuts)
                ]
                packs[processor] = [
                    pack(parts) if len(parts) > 1 else parts[0] for parts in zip(*pieces)
                ]
        wanted = grouped(group, [part_number(mesh_impl, cuts[0], p) for p in group])
        for number, processors in wanted.items():
            device = mesh_impl.devices[processors[turn % len(processors)]]
            total = sum_on_one_device([packs[p][number] for p in group], device)
            with tf.device(device):
                parts = unpack(total, shapes) if len(shapes) > 1 else [total]
            results.update(dict.fromkeys(processors, parts))
    return _by_tensor(mesh_impl, results)


def _by_tensor(mesh_impl: Any, slices: dict[int, Sequence[tf.Tensor]]) -> list[Any]:
    """Returns `LaidOutTensor`s, given for each processor a list of its slices of all tensors."""
    return [
        mesh_impl.LaidOutTensor(list(one))
        for one in zip(*(slices[p] for p in range(mesh_impl.size)))
    ]


def all_gather(
    mesh_impl: Any, parts: Sequence[Any], cuts: Sequence[Cuts], bucket_bytes: int
) -> list[Any]:
    """Returns whole slices on each processor, gathered from the parts on all processors.

    `parts` are `LaidOutTensor`s of each processor's part. `cuts` says, for each of them, which axes
    of the whole slice are split, and over which mesh axes. On a placement mesh each slice is put
    together once in every memory. If there are several memories, small parts are sent between them
    in buckets of at most `bucket_bytes` per processor.
    """
    if is_simd(mesh_impl):
        return simd_all_gather(mesh_impl, parts, cuts)
    if share_one_memory(mesh_impl):
        bucket_bytes = 0
    gather = functools.partial(_gather_on_devices, mesh_impl)
    return _in_buckets(parts, cuts, bucket_bytes, gather)


def _gather_on_devices(
    mesh_impl: Any, parts: Sequence[Any], cuts: Sequence[Cuts], turn: int
) -> list[Any]:
    shapes = [part.slice_shape for part in parts]
    packed = [part.tensor_list for part in parts]
    if len(parts) > 1:
        packs = mesh_impl.slicewise(lambda *xs: pack(xs), *parts).tensor_list
    results: dict[int, Sequence[tf.Tensor]] = {}
    memory = {p: n for n, members in enumerate(memories(mesh_impl.devices)) for p in members}
    made: dict[tuple[Any, ...], list[Any]] = {}
    for number, group in enumerate(slice_groups(mesh_impl, cuts[0]).groups):
        for home, members in grouped(group, [memory[p] for p in group]).items():
            key = (home, *(id(slices[p]) for slices in packed for p in group))
            if key not in made:
                with tf.device(mesh_impl.devices[members[(turn + number) % len(members)]]):
                    by_member = (
                        [unpack(packs[p], shapes) for p in group]
                        if len(parts) > 1
                        else [[packed[0][p]] for p in group]
                    )
                    made[key] = [
                        join_parts(mesh_impl, [one[i] for one in by_member], c)
                        for i, c in enumerate(cuts)
                    ]
            results.update(dict.fromkeys(members, made[key]))
    return _by_tensor(mesh_impl, results)
