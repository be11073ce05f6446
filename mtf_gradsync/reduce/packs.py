"""Packs: tensors that are reduced as one, by a plan."""

from __future__ import annotations

import collections
import functools
import itertools
from typing import Any, Callable, Iterator, List, NamedTuple, Sequence

from mtf_gradsync._common import check_whole_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.axes import ProcessorGroups, is_simd
from mtf_gradsync.mesh.devices import slicewise
from mtf_gradsync.reduce.sums import SumFn, check_values


class Piece(NamedTuple):
    """The elements of tensor `index`, from `start` to before `stop`, in row-major order."""

    tensor: int
    start: int
    stop: int


#: A plan: the pieces of each pack. Each element of each tensor is in one pack, and the pieces of a
#: tensor are in order.
Packs = List[List[Piece]]
#: Makes a plan from the sizes of tensors in elements and the bytes of an element.
Planner = Callable[[Sequence[int], int], Packs]


def plan_buckets(
    num_bytes: Sequence[int], bucket_bytes: int, packed_bytes: int | None = None
) -> list[list[int]]:
    """Returns the indices of tensors in each bucket of at most bucket_bytes, filled first fit.

    A tensor that is larger than a bucket, or than packed_bytes, is alone in its bucket.
    """
    buckets: list[list[int]] = []
    rooms: list[int] = []
    for index, size in enumerate(num_bytes):
        fitting = None
        packed = bucket_bytes > 0 and (packed_bytes is None or size <= packed_bytes)
        if packed:
            fitting = next((i for i, room in enumerate(rooms) if size <= room), None)
        if fitting is None:
            buckets.append([index])
            # Less than the smallest tensor takes, so that nothing joins a tensor that is alone.
            rooms.append(bucket_bytes - size if packed else -1)
        else:
            buckets[fitting].append(index)
            rooms[fitting] -= size
    return buckets


def plan_small_groups(num_bytes: Sequence[int], max_bytes: int, max_group: int) -> list[list[int]]:
    """Returns groups of indices: up to max_group tensors of at most max_bytes; others alone."""
    groups: list[list[int]] = []
    filling: list[int] = []
    for index, size in enumerate(num_bytes):
        if max_bytes <= 0 or max_group <= 0 or size > max_bytes:
            groups.append([index])
            continue
        if not filling or len(filling) == max_group:
            filling = []
            groups.append(filling)
        filling.append(index)
    return groups


def packs_of_groups(groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> Packs:
    """Returns one pack for each group of indices, with all elements of its tensors."""
    return [[Piece(i, 0, sizes[i]) for i in group] for group in groups]


def plan_packs(sizes: Sequence[int], num_packs: int) -> Packs:
    """Returns packs of tensors of these numbers of elements, laid end to end; see `split_pack`."""
    return split_pack([Piece(index, 0, size) for index, size in enumerate(sizes)], num_packs)


def split_pack(pack: Sequence[Piece], parts: int) -> Packs:
    """Splits a pack evenly; the last part takes the rest. Empty parts are not returned.

    A pack of fewer elements than parts stays whole, as in TensorFlow 1.
    """
    share = sum(piece.stop - piece.start for piece in pack) // parts
    parts = parts if share else 1

    def part_of(position: int) -> int:
        return min(position // share, parts - 1) if share else parts - 1

    result: Packs = [[] for _ in range(parts)]
    offset = 0
    for tensor, start, stop in pack:
        end = offset + stop - start
        # A piece without elements is in one part, too.
        for part in range(part_of(offset), part_of(max(offset, end - 1)) + 1):
            low = max(offset, part * share)
            high = end if part == parts - 1 else min(end, (part + 1) * share)
            result[part].append(Piece(tensor, start + low - offset, start + high - offset))
        offset = end
    return [part for part in result if part]


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns tensors of one dtype as one: stacked if of one shape, else flattened and joined."""
    if _one_shape([t.shape.as_list() for t in tensors]):
        return tf.stack(tensors)
    flat = tf.constant([-1])
    return tf.concat([t if t.shape.rank == 1 else tf.reshape(t, flat) for t in tensors], 0)


def unpack(packed: tf.Tensor, shapes: Sequence[Sequence[int]]) -> tuple[tf.Tensor, ...]:
    """Returns the tensors of these shapes that `pack` made one tensor of."""
    if _one_shape(shapes):
        return tuple(tf.unstack(packed, len(shapes)))
    pieces = tf.split(packed, [tf.TensorShape(shape).num_elements() for shape in shapes])
    # One constant for each shape, as many tensors share few shapes.
    constants = {tuple(s): tf.constant(list(s), tf.int32) for s in shapes if len(s) != 1}
    return tuple(
        piece if len(shape) == 1 else tf.reshape(piece, constants[tuple(shape)])
        for piece, shape in zip(pieces, shapes)
    )


def _one_shape(shapes: Sequence[Sequence[int]]) -> bool:
    return all(list(shape) == list(shapes[0]) for shape in shapes)


class Packer:
    """A `Planner` that packs tensors in one of the three ways of TensorFlow 1's all-reduce."""

    def __init__(
        self,
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ):
        """Sets the way to pack, as `AllReduce` describes: the first argument that is not 0."""
        max_bytes, max_group = agg_small_grads_max_bytes, agg_small_grads_max_group
        self.num_packs = check_whole_number("num_packs", num_packs, 0)
        self.max_bytes = check_whole_number("agg_small_grads_max_bytes", max_bytes, 0, most=None)
        self.max_group = check_whole_number("agg_small_grads_max_group", max_group, 0)

    @property
    def packs_tensors(self) -> bool:
        """Whether it packs any tensors; otherwise each is alone."""
        return self.num_packs > 0 or (self.max_bytes > 0 and self.max_group > 0)

    def __call__(self, sizes: Sequence[int], itemsize: int) -> Packs:
        """Plans packs of tensors with `sizes` elements of `itemsize` bytes."""
        if self.num_packs > 0:
            return plan_packs(sizes, self.num_packs)
        num_bytes = [size * itemsize for size in sizes]
        return packs_of_groups(plan_small_groups(num_bytes, self.max_bytes, self.max_group), sizes)


# In one memory each device can unpack a sum, or one unpacks it and sends the tensors to the others.
# Measured on CPU devices: a message costs as much as copying this many bytes.
MESSAGE_BYTES = 32 * 1024


def alone(sizes: Sequence[int], itemsize: int) -> Packs:
    """Plans no packs: each tensor is alone. A `Planner`."""
    del itemsize
    return packs_of_groups([[i] for i in range(len(sizes))], sizes)


def packed_all_reduce(
    mesh_impl: Any,
    values: Sequence[Any],
    groups: ProcessorGroups,
    sum_fn: SumFn,
    planner: Planner = alone,
    turns: Iterator[int] | None = None,
) -> list[Any]:
    """Sums values over groups in packs of one dtype, which `planner` plans and `sum_fn` sums.

    All packs are summed by one call. `turns` counts them, to spread them over the devices. Tensors
    without elements, and all values if groups are of one processor, are returned as they are.
    """
    values = list(values)
    check_values(values)
    if groups.group_size == 1:
        return values
    turns = turns or itertools.count()
    by_dtype: dict[tf.DType, list[int]] = collections.OrderedDict()
    for index, value in enumerate(values):
        # Collectives refuse empty tensors.
        if mtf.list_product(value.slice_shape) > 0:
            by_dtype.setdefault(value.tensor_list[0].dtype.base_dtype, []).append(index)
    packs: Packs = []
    for dtype, indices in by_dtype.items():
        # Neighbours of one shape are stacked, not flattened.
        indices.sort(key=lambda i: tuple(values[i].slice_shape))
        sizes = [mtf.list_product(values[i].slice_shape) for i in indices]
        packs += [
            [piece._replace(tensor=indices[piece.tensor]) for piece in pack]
            for pack in planner(sizes, dtype.size)
        ]
    return _sum_packs(mesh_impl, values, packs, groups, sum_fn, turns) if packs else values


def _sum_packs(
    mesh_impl: Any,
    values: Sequence[Any],
    packs: Packs,
    groups: ProcessorGroups,
    sum_fn: SumFn,
    turns: Iterator[int],
) -> list[Any]:
    """Sums values in packs of one dtype; returns values that are in no pack as they are."""
    pieces: dict[int, list[Piece]] = collections.defaultdict(list)
    for piece in itertools.chain.from_iterable(packs):
        pieces[piece.tensor].append(piece)
    parts: dict[Piece, Any] = {}
    for index, some in pieces.items():
        parts.update(zip(some, _cut(mesh_impl, values[index], some)))
    packed = [_pack(mesh_impl, [parts[p] for p in pack]) for pack in packs]
    for pack, total in zip(packs, sum_fn(packed, groups, [next(turns) for _ in packs])):
        shapes = [parts[p].slice_shape for p in pack]
        several = len(shapes) > 1
        fn = functools.partial(unpack, shapes=shapes)
        own = _on_sums(mesh_impl, fn, [total], len(shapes)) if several else [total]
        parts.update(zip(pack, own))
    results = list(values)
    for index, some in pieces.items():
        shape = values[index].slice_shape
        results[index] = _join(mesh_impl, [parts[p] for p in some], shape)
    return results


def _pack(mesh_impl: Any, members: Sequence[Any]) -> Any:
    if len(members) == 1:
        return members[0]
    return mesh_impl.slicewise(lambda *slices: pack(slices), *members)


def _cut(mesh_impl: Any, value: Any, pieces: Sequence[Piece]) -> Sequence[Any]:
    if len(pieces) == 1:
        return [value]
    sizes = [piece.stop - piece.start for piece in pieces]
    return mesh_impl.slicewise(lambda x: tuple(tf.split(tf.reshape(x, [-1]), sizes)), value)


def _join(mesh_impl: Any, parts: Sequence[Any], shape: Sequence[int]) -> Any:
    if len(parts) == 1:
        return parts[0]

    def join(*flat: tf.Tensor) -> tuple[tf.Tensor]:
        return (tf.reshape(tf.concat(flat, 0), shape),)

    return _on_sums(mesh_impl, join, parts, 1)[0]


def _on_sums(
    mesh_impl: Any,
    fn: Callable[..., tuple[tf.Tensor, ...]],
    sums: Sequence[Any],
    num_results: int,
) -> Sequence[Any]:
    """Applies a function that only copies slices to sums, which processors may share."""
    itemsize = sums[0].tensor_list[0].dtype.size
    num_bytes = itemsize * sum(mtf.list_product(x.slice_shape) for x in sums)
    if is_simd(mesh_impl) or num_bytes < MESSAGE_BYTES * num_results:
        return mesh_impl.slicewise(fn, *sums)
    results = slicewise(mesh_impl, fn, [x.tensor_list for x in sums])
    return [mesh_impl.LaidOutTensor(list(slices)) for slices in zip(*results)]
