"""Sums over groups of processors in one level, on placement and SIMD meshes."""

from __future__ import annotations

from typing import Any, Callable

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.mesh_tensorflow import bfloat16_group_size
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.mesh.shared_copies import first_alike
from mtf_gradsync.reduce.sums.algorithms import GroupSum, add_n

#: Sums a value over groups: (`LaidOutTensor`, groups, turn) -> `LaidOutTensor`. Different turns
#: spread the work over the devices.
SumFn = Callable[[Any, ProcessorGroups, int], Any]


def simd_wire_dtype(mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
    """Returns the dtype in which Mesh-TF sends values over a SIMD mesh.

    float32 is sent as it is, and so is bfloat16 in groups of at most 8 processors (an argument of
    `SimdMeshImpl`) along mesh axes. Every other dtype is sent as float32, so float64 has float32's
    precision and integers are exact up to 2**24.
    """
    if dtype != tf.bfloat16 or groups.mesh_axes is None:
        return tf.float32
    return tf.bfloat16 if groups.group_size <= bfloat16_group_size(mesh_impl) else tf.float32


def simd_all_reduce(mesh_impl: Any, value: Any, groups: ProcessorGroups) -> Any:
    """Sums over groups by one CrossReplicaSum, in `simd_wire_dtype`."""
    if groups.mesh_axes is not None:
        return mesh_impl.allreduce(value, list(groups.mesh_axes), "SUM")
    physical = [[mesh_impl.l2p(p) for p in group] for group in groups.groups]

    def cross_replica_sum(x: tf.Tensor) -> tf.Tensor:
        wire = x if x.dtype == tf.float32 else tf.cast(x, tf.float32)
        return tf.cast(tf.tpu.cross_replica_sum(wire, physical), x.dtype)

    return mesh_impl.slicewise(cross_replica_sum, value)


def placement_all_reduce(
    mesh_impl: Any, value: Any, groups: ProcessorGroups, turn: int, group_sum: GroupSum = add_n
) -> Any:
    """Sums over groups of a placement mesh.

    Groups with the same tensors in the same memories, as on a mesh that shares copies, sum them
    once and share the sum. The member of the number `turn`, modulo the group's size, adds up.
    """
    slices = value.tensor_list
    result: list[Any] = [None] * len(slices)
    first = first_alike(mesh_impl, slices, groups.groups)
    for number, group in enumerate(groups.groups):
        if first[number] is not group:
            for processor, twin in zip(group, first[number]):
                result[processor] = result[twin]
            continue
        sums = group_sum(
            [slices[p] for p in group],
            [mesh_impl.devices[p] for p in group],
            (turn + number) % len(group),
        )
        for processor, total in zip(group, sums):
            result[processor] = total
    return mesh_impl.LaidOutTensor(result)


def all_reduce_fn(mesh_impl: Any, group_sum: GroupSum = add_n) -> SumFn:
    """Returns the function that sums on a mesh; a SIMD mesh has one algorithm only."""
    if is_simd(mesh_impl):
        return lambda value, groups, turn: simd_all_reduce(mesh_impl, value, groups)
    return lambda value, groups, turn: placement_all_reduce(
        mesh_impl, value, groups, turn, group_sum
    )
