"""Sums of which each processor gets its own part."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import cross_replica_scatter
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.reduce.packs import packing
from mtf_gradsync.reduce.parts import by_part
from mtf_gradsync.reduce.parts.cuts import (
    Cuts,
    all_parts,
    buckets,
    groups_of,
    part_number,
    part_shape,
)
from mtf_gradsync.reduce.sums.algorithms import sum_on_one_device
from mtf_gradsync.reduce.sums.one_level import simd_wire_dtype

# As for sums: every collective pays a latency, and the bucket bounds the extra memory.
SIMD_BUCKET_BYTES = 32 * 1024 * 1024
# The TPU compiler (libtpu 0.0.17, v5e and v6e) keeps a reduce-scatter of whole tiles of its memory,
# 8 sublanes of 128 lanes, and makes an all-reduce of any other, which sends twice as much.
_LANES = 128
_TILE = 8 * _LANES


def reduce_scatter(
    mesh_impl: Any,
    values: Sequence[Any],
    groups: ProcessorGroups,
    cuts: Sequence[Cuts],
    bucket_bytes: int,
) -> list[Any]:
    """Sums values over groups, in buckets; each processor gets its part of each sum only.

    On a SIMD mesh each bucket is one reduce-scatter, and a small one of what fills no tile. On a
    placement mesh each processor adds up its part of a bucket.

    Args:
      mesh_impl: the mesh.
      values: `LaidOutTensor`s.
      groups: the processors that sum with each other, along mesh axes.
      cuts: for each value how it is cut, along some of the axes of the groups.
      bucket_bytes: most bytes per processor that a bucket of several values holds.

    Returns:
      `LaidOutTensor`s of the dtypes of values, in the same order.
    """
    results: list[Any] = [None] * len(values)
    for turn, members in enumerate(buckets(values, cuts, bucket_bytes)):
        bucket_values, bucket_cuts = [values[i] for i in members], [cuts[i] for i in members]
        if is_simd(mesh_impl):
            parts = _on_simd(mesh_impl, bucket_values, groups, bucket_cuts)
        else:
            parts = _on_devices(mesh_impl, bucket_values, groups, bucket_cuts, turn)
        for index, part in zip(members, parts):
            results[index] = part
    return results


def _on_simd(
    mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, cuts: Sequence[Cuts]
) -> list[Any]:
    shapes = [value.slice_shape for value in values]
    rows = [
        mesh_impl.slicewise(lambda x, c=c: by_part.to_rows(mesh_impl, x, c), value)
        for value, c in zip(values, cuts)
    ]
    widths = [row.slice_shape[1] for row in rows]
    along = groups_of(mesh_impl, cuts[0])
    physical = [[mesh_impl.l2p(p) for p in group] for group in along.groups]
    dtype = rows[0].tensor_list[0].dtype
    wire = simd_wire_dtype(mesh_impl, dtype, along)
    tiled = sum(widths) // _TILE * _TILE

    def scatter(*xs: tf.Tensor) -> tf.Tensor:
        sent = []
        for pieces in _cut_at(xs, tiled):
            x = _joined(pieces)
            x = x if wire == dtype else tf.cast(x, wire)
            parts, width = x.shape.as_list()
            if width % _TILE == 0:
                x = tf.reshape(x, [parts, width // _LANES, _LANES])
            sent.append(tf.reshape(cross_replica_scatter(x, physical, 0), [1, width]))
        total = _joined(sent)
        return total if wire == dtype else tf.cast(total, dtype)

    mine = mesh_impl.slicewise(scatter, *rows)
    assert groups.mesh_axes is not None  # the groups run along axes
    assert along.mesh_axes is not None
    rest = [axis for axis in groups.mesh_axes if axis not in along.mesh_axes]
    if rest:
        mine = mesh_impl.allreduce(mine, rest, "SUM")

    def unpack(row: tf.Tensor) -> tuple[tf.Tensor, ...]:
        pieces = tf.split(row, widths, 1) if len(widths) > 1 else [row]
        return tuple(
            by_part.part_of_row(mesh_impl, piece, shape, c)
            for piece, shape, c in zip(pieces, shapes, cuts)
        )

    return list(mesh_impl.slicewise(unpack, mine))


def _cut_at(rows: Sequence[tf.Tensor], width: int) -> list[list[tf.Tensor]]:
    """Matrices that stand side by side, cut after so many columns: both sides that have any."""
    before: list[tf.Tensor] = []
    behind: list[tf.Tensor] = []
    left = width
    for row in rows:
        own = row.shape.as_list()[1]
        if own <= left:
            before.append(row)
        elif left:
            before.append(row[:, :left])
            behind.append(row[:, left:])
        else:
            behind.append(row)
        left = max(0, left - own)
    return [side for side in (before, behind) if side]


def _joined(rows: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat(rows, 1) if len(rows) > 1 else rows[0]


def _on_devices(
    mesh_impl: Any,
    values: Sequence[Any],
    groups: ProcessorGroups,
    cuts: Sequence[Cuts],
    turn: int,
) -> list[Any]:
    shapes = [part_shape(mesh_impl, v.slice_shape, c) for v, c in zip(values, cuts)]
    results: list[list[Any]] = [[None] * mesh_impl.size for _ in values]
    for group in groups.groups:
        packs = {}
        for processor in group:
            # Cut where it is, so that only the parts are sent.
            with tf.device(mesh_impl.devices[processor]):
                pieces = [
                    all_parts(mesh_impl, v.tensor_list[processor], c) for v, c in zip(values, cuts)
                ]
                packs[processor] = [
                    packing.pack(parts) if len(parts) > 1 else parts[0] for parts in zip(*pieces)
                ]
        wanted: dict[int, list[int]] = {}
        for processor in group:
            wanted.setdefault(part_number(mesh_impl, cuts[0], processor), []).append(processor)
        for number, processors in wanted.items():
            device = mesh_impl.devices[processors[turn % len(processors)]]
            total = sum_on_one_device([packs[p][number] for p in group], device)
            with tf.device(device):
                parts = packing.unpack(total, shapes) if len(shapes) > 1 else [total]
            for processor in processors:
                for result, part in zip(results, parts):
                    result[processor] = part
    return [mesh_impl.LaidOutTensor(result) for result in results]
