"""Packed sums, which all strategies share: plan, pack, sum each pack, unpack."""

from __future__ import annotations

import collections
import itertools
from typing import Any, Callable, Iterator, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.mesh.shared_copies import slicewise
from mtf_gradsync.reduce.checks import check_values
from mtf_gradsync.reduce.packs import packing
from mtf_gradsync.reduce.packs.planning import Packs, Piece, Planner, packs_of_groups
from mtf_gradsync.reduce.sums.one_level import SumFn

# In one memory each device can unpack a sum, or one unpacks it and sends the tensors to the others.
# Measured on CPU devices: a message costs as much as copying this many bytes.
MESSAGE_BYTES = 32 * 1024


def alone(sizes: Sequence[int], itemsize: int) -> Packs:
    """A `Planner` that packs nothing."""
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
    """Sums values in packs of one dtype; returns those that are in no pack as they are."""
    pieces: dict[int, list[Piece]] = collections.defaultdict(list)
    for piece in itertools.chain.from_iterable(packs):
        pieces[piece.tensor].append(piece)
    parts: dict[Piece, Any] = {}
    for index, some in pieces.items():
        parts.update(zip(some, _cut(mesh_impl, values[index], some)))
    packed = [_pack(mesh_impl, [parts[p] for p in pack]) for pack in packs]
    for pack, total in zip(packs, sum_fn(packed, groups, [next(turns) for _ in packs])):
        shapes = [parts[p].slice_shape for p in pack]
        parts.update(zip(pack, _unpack(mesh_impl, total, shapes)))
    results = list(values)
    for index, some in pieces.items():
        shape = values[index].slice_shape
        results[index] = _join(mesh_impl, [parts[p] for p in some], shape)
    return results


def _pack(mesh_impl: Any, members: Sequence[Any]) -> Any:
    if len(members) == 1:
        return members[0]
    return mesh_impl.slicewise(lambda *slices: packing.pack(slices), *members)


def _unpack(mesh_impl: Any, total: Any, shapes: Sequence[Sequence[int]]) -> Sequence[Any]:
    if len(shapes) == 1:
        return [total]
    return _on_sums(mesh_impl, lambda x: packing.unpack(x, shapes), [total], len(shapes))


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
    """Applies a function of slices that only copies to sums, which processors may share."""
    itemsize = sums[0].tensor_list[0].dtype.size
    num_bytes = itemsize * sum(mtf.list_product(x.slice_shape) for x in sums)
    if is_simd(mesh_impl) or num_bytes < MESSAGE_BYTES * num_results:
        return mesh_impl.slicewise(fn, *sums)
    results = slicewise(mesh_impl, fn, [x.tensor_list for x in sums])
    return [mesh_impl.LaidOutTensor(list(slices)) for slices in zip(*results)]
