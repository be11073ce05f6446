"""Reduce-scatter and all-gather on a SIMD mesh, each tensor in its own shape and layout.

Packing would copy every tensor in and out, so each has a collective of its own, along the dimension
that is cut. Only small tensors of one shape share one: it costs less to copy them.
"""

from __future__ import annotations

import collections
from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import (
    PASSES_ON,
    cross_replica_gather,
    cross_replica_scatter,
    set_attr,
    summed_together,
)
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.reduce.parts import by_part
from mtf_gradsync.reduce.parts.cuts import Cuts, groups_of, mesh_axes_of, part_shape
from mtf_gradsync.reduce.sums.one_level import (
    physical_groups,
    simd_all_reduce,
    simd_wire_dtype,
)

# A tile of a TPU's memory: 8 sublanes of 128 lanes. Smaller parts share an all-gather.
_TILE = 8 * 128
# Smaller parts share a reduce-scatter. The compiler merges neighbouring ones of small tensors by
# itself, and a packed one holds all gradients twice.
_SCATTERED_ALONE = _TILE // 2
# The TPU compiler gives a gathered tensor no variable's memory: where it is a variable's new value,
# the variable is copied when the step begins, and the new value when it ends. An operation between
# the two writes into the variable's memory. For tensors of fewer numbers it takes more time than
# the copies.
_WRITTEN_IN_PLACE = 64 * 1024


def scatter_together(
    mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, cuts: Sequence[Cuts]
) -> list[Any]:
    """Returns each core's part of sums, see `Strategy.reduce_scatter`."""
    shapes = [part_shape(mesh_impl, v.slice_shape, c) for v, c in zip(values, cuts)]
    sharing = _sharing(values, shapes, cuts, _SCATTERED_ALONE)
    with summed_together():
        scattered = [
            _scattered(mesh_impl, [values[i] for i in members], cuts[members[0]])
            for members in sharing
        ]
    assert groups.mesh_axes is not None  # the groups run along axes
    # A part is summed over the axes along which its tensor is not cut.
    by_rest: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
    for number, members in enumerate(sharing):
        cut = mesh_axes_of(cuts[members[0]])
        by_rest[tuple(axis for axis in groups.mesh_axes if axis not in cut)].append(number)
    for rest, numbers in by_rest.items():
        if rest:
            along = ProcessorGroups.along(mesh_impl, rest)
            sums = simd_all_reduce(mesh_impl, [scattered[n] for n in numbers], along)
            for number, total in zip(numbers, sums):
                scattered[number] = total
    results: list[Any] = [None] * len(values)
    for members, parts in zip(sharing, scattered):
        first = members[0]
        shape = values[first].slice_shape
        unpacked = _parts_of(mesh_impl, parts, len(members), shape, cuts[first])
        for index, part in zip(members, unpacked):
            results[index] = part
    return results


def gather_together(mesh_impl: Any, parts: Sequence[Any], cuts: Sequence[Cuts]) -> list[Any]:
    """Returns full slices on each core, from the parts that belong to its coordinates."""
    results: list[Any] = [None] * len(parts)
    with summed_together():
        for members in _sharing(parts, [p.slice_shape for p in parts], cuts, _TILE):
            slices = _gathered(mesh_impl, [parts[i] for i in members], cuts[members[0]])
            for index, full in zip(members, slices):
                results[index] = full
    return results


def _sharing(
    tensors: Sequence[Any],
    part_shapes: Sequence[Sequence[int]],
    cuts: Sequence[Cuts],
    least: int,
) -> list[list[int]]:
    """Returns positions of tensors, in one list for each collective."""
    sharing: dict[tuple[Any, ...], list[int]] = collections.defaultdict(list)
    for index, (tensor, shape) in enumerate(zip(tensors, part_shapes)):
        alone = index if mtf.list_product(shape) >= least else -1
        dtype = tensor.tensor_list[0].dtype.base_dtype
        sharing[alone, tuple(shape), tuple(cuts[index]), dtype].append(index)
    return list(sharing.values())


def _scattered(mesh_impl: Any, values: Sequence[Any], cuts: Cuts) -> Any:
    """Returns each core's part of the sums of values of one shape, in one tensor."""
    along = groups_of(mesh_impl, cuts)
    dtype = values[0].tensor_list[0].dtype
    wire = simd_wire_dtype(mesh_impl, dtype, along)
    by_rows = len(cuts) > 1

    def scatter(*xs: tf.Tensor) -> tf.Tensor:
        if by_rows:
            xs = tuple(by_part.to_rows(mesh_impl, x, cuts) for x in xs)
        x = tf.stack(xs) if len(xs) > 1 else xs[0]
        axis = x.shape.ndims - xs[0].shape.ndims + (0 if by_rows else cuts[0].tensor_axis)
        sent = x if wire == dtype else tf.cast(x, wire)
        total = cross_replica_scatter(sent, physical_groups(mesh_impl, along), axis)
        return total if wire == dtype else tf.cast(total, dtype)

    return mesh_impl.slicewise(scatter, *values)


def _parts_of(
    mesh_impl: Any, scattered: Any, count: int, shape: Sequence[int], cuts: Cuts
) -> list[Any]:
    """Returns the parts of `count` values of a shape that `_scattered` made one tensor of."""

    def unpacked(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        pieces = tf.unstack(x) if count > 1 else [x]
        if len(cuts) > 1:
            pieces = [by_part.part_of_row(mesh_impl, p, shape, cuts) for p in pieces]
        return tuple(pieces)

    return list(mesh_impl.slicewise(unpacked, scattered))


def _gathered(mesh_impl: Any, parts: Sequence[Any], cuts: Cuts) -> Sequence[Any]:
    physical = physical_groups(mesh_impl, groups_of(mesh_impl, cuts))
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
            pieces = [by_part.from_rows(mesh_impl, p, shape, cuts) for p in pieces]
        if mtf.list_product(shape) >= _WRITTEN_IN_PLACE:
            # Always so, but the compiler does not know it.
            is_processor = number >= 0
            pieces = [tf.where_v2(is_processor, p, tf.zeros_like(p)) for p in pieces]
            for piece in pieces:
                set_attr(piece.op, PASSES_ON, tf.AttrValue(b=True))
        return tuple(pieces)

    return list(mesh_impl.slicewise(gather, mesh_impl.laid_out_pnum(), *parts))
