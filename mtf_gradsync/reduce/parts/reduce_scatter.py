"""Reduce-scatter: each processor gets its part of sums over groups of processors."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.reduce.packs import packing
from mtf_gradsync.reduce.parts.cuts import (
    Cuts,
    all_parts,
    buckets,
    part_number,
    part_shape,
)
from mtf_gradsync.reduce.parts.on_simd import scatter_together
from mtf_gradsync.reduce.sums.algorithms import sum_on_one_device

# Every collective pays a latency, and the bucket bounds the extra memory.
SIMD_BUCKET_BYTES = 32 * 1024 * 1024


def reduce_scatter(
    mesh_impl: Any,
    values: Sequence[Any],
    groups: ProcessorGroups,
    cuts: Sequence[Cuts],
    bucket_bytes: int = 0,
) -> list[Any]:
    """Returns each processor's part of sums, see `Strategy.reduce_scatter`.

    On a placement mesh each processor adds up its part of a bucket of several values, which has at
    most bucket_bytes per processor.
    """
    if is_simd(mesh_impl):
        return scatter_together(mesh_impl, values, groups, cuts)
    results: list[Any] = [None] * len(values)
    for turn, members in enumerate(buckets(values, cuts, bucket_bytes)):
        bucket_values, bucket_cuts = [values[i] for i in members], [cuts[i] for i in members]
        parts = _on_devices(mesh_impl, bucket_values, groups, bucket_cuts, turn)
        for index, part in zip(members, parts):
            results[index] = part
    return results


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
            # Each value is cut on the device that holds it, so that only parts are sent.
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
