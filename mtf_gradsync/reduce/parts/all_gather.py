"""All-gather: every processor gets the full slices of tensors that are held in parts."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.mesh.topology import memories
from mtf_gradsync.reduce.packs import packing
from mtf_gradsync.reduce.parts.cuts import Cuts, buckets, groups_of, joined, one_memory
from mtf_gradsync.reduce.parts.on_simd import gather_together


def all_gather(
    mesh_impl: Any, parts: Sequence[Any], cuts: Sequence[Cuts], bucket_bytes: int
) -> list[Any]:
    """Returns full slices on each processor, from the parts that belong to its coordinates.

    On a placement mesh each slice is joined once per memory; between memories small parts are sent
    in buckets of bucket_bytes per processor.
    """
    if is_simd(mesh_impl):
        return gather_together(mesh_impl, parts, cuts)
    results: list[Any] = [None] * len(parts)
    packs = not one_memory(mesh_impl)
    for turn, members in enumerate(buckets(parts, cuts, bucket_bytes if packs else 0)):
        bucket_parts, bucket_cuts = [parts[i] for i in members], [cuts[i] for i in members]
        full_slices = _on_devices(mesh_impl, bucket_parts, bucket_cuts, turn)
        for index, full in zip(members, full_slices):
            results[index] = full
    return results


def _on_devices(mesh_impl: Any, parts: Sequence[Any], cuts: Sequence[Cuts], turn: int) -> list[Any]:
    shapes = [part.slice_shape for part in parts]
    packed = [part.tensor_list for part in parts]
    if len(parts) > 1:
        packs = mesh_impl.slicewise(lambda *xs: packing.pack(xs), *parts).tensor_list
    results: list[list[Any]] = [[None] * mesh_impl.size for _ in parts]
    memory = {p: n for n, members in enumerate(memories(mesh_impl.devices)) for p in members}
    made: dict[tuple[Any, ...], list[Any]] = {}
    for number, group in enumerate(groups_of(mesh_impl, cuts[0]).groups):
        homes: dict[int, list[int]] = {}
        for processor in group:
            homes.setdefault(memory[processor], []).append(processor)
        for home, members in homes.items():
            key = (home, *(id(slices[p]) for slices in packed for p in group))
            if key not in made:
                with tf.device(mesh_impl.devices[members[(turn + number) % len(members)]]):
                    by_member = (
                        [packing.unpack(packs[p], shapes) for p in group]
                        if len(parts) > 1
                        else [[packed[0][p]] for p in group]
                    )
                    made[key] = [
                        joined(mesh_impl, [one[i] for one in by_member], c)
                        for i, c in enumerate(cuts)
                    ]
            for processor in members:
                for result, full in zip(results, made[key]):
                    result[processor] = full
    return [mesh_impl.LaidOutTensor(result) for result in results]
