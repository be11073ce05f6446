"""Sums over groups of processors in one level, on placement and SIMD meshes."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.mesh_tensorflow import bfloat16_group_size
from mtf_gradsync._private.tensorflow import summed_together
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.mesh.shared_copies import first_alike
from mtf_gradsync.reduce.sums.algorithms import GroupSum, add_n

#: Sums values over groups: (`LaidOutTensor`s, groups, turns) -> `LaidOutTensor`s. Each value has a
#: turn; different turns spread the work over the devices.
SumFn = Callable[[Sequence[Any], ProcessorGroups, Sequence[int]], Sequence[Any]]


def simd_wire_dtype(mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
    """Returns the dtype in which Mesh-TF sends values over a SIMD mesh: float32 for most.

    bfloat16 is sent as it is in groups of at most 8 processors (an argument of `SimdMeshImpl`)
    along mesh axes. As float32, float64 loses precision, and integers are exact up to 2**24.
    """
    if dtype != tf.bfloat16 or groups.mesh_axes is None:
        return tf.float32
    return tf.bfloat16 if groups.group_size <= bfloat16_group_size(mesh_impl) else tf.float32


def simd_all_reduce(
    mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, one_group: bool = True
) -> list[Any]:
    """Sums each value over groups by a CrossReplicaSum of its own, in `simd_wire_dtype`.

    With `one_group` these sums are marked as one group, which compilers combine: none of the values
    may depend on the sum of another.
    """

    def cross_replica_sum(x: tf.Tensor) -> tf.Tensor:
        wire = x if x.dtype == tf.float32 else tf.cast(x, tf.float32)
        return tf.cast(tf.tpu.cross_replica_sum(wire, physical), x.dtype)

    with summed_together() if one_group else contextlib.nullcontext():
        if groups.mesh_axes is not None:
            return [mesh_impl.allreduce(x, list(groups.mesh_axes), "SUM") for x in values]
        physical = physical_groups(mesh_impl, groups)
        return [mesh_impl.slicewise(cross_replica_sum, x) for x in values]


def placement_all_reduce(
    mesh_impl: Any, value: Any, groups: ProcessorGroups, turn: int, group_sum: GroupSum = add_n
) -> Any:
    """Sums over groups of a placement mesh; `turn` chooses the member that adds up, if one does."""

    def sums(number: int, group: list[int]) -> Sequence[Any]:
        slices = [value.tensor_list[p] for p in group]
        devices = [mesh_impl.devices[p] for p in group]
        return group_sum(slices, devices, (turn + number) % len(group))

    return in_groups(mesh_impl, value, groups, sums)


def in_groups(
    mesh_impl: Any,
    value: Any,
    groups: ProcessorGroups,
    compute: Callable[[int, list[int]], Sequence[Any]],
) -> Any:
    """Gives the members of each group the slices that compute(the group's number, members) returns.

    Groups whose slices of `value` are the same tensors in the same memories, as on a mesh that
    shares copies, share the result.
    """
    result: list[Any] = [None] * mesh_impl.size
    first = first_alike(mesh_impl, value.tensor_list, groups.groups)
    for number, group in enumerate(groups.groups):
        if first[number] is group:
            slices = compute(number, group)
        else:
            slices = [result[twin] for twin in first[number]]
        for processor, one in zip(group, slices):
            result[processor] = one
    return mesh_impl.LaidOutTensor(result)


def physical_groups(mesh_impl: Any, groups: ProcessorGroups) -> list[list[int]]:
    """Returns groups as the physical cores of a SIMD mesh, which its collectives take."""
    return [[mesh_impl.l2p(p) for p in group] for group in groups.groups]


def positions(mesh_impl: Any, groups: ProcessorGroups) -> Any:
    """Returns each processor's position in its group, a `LaidOutTensor` of int32 scalars."""
    at = [0] * mesh_impl.size
    for group in groups.groups:
        for position, processor in enumerate(group):
            at[processor] = position
    if not is_simd(mesh_impl):
        return mesh_impl.LaidOutTensor(at)
    return mesh_impl.slicewise(lambda p: tf.gather(at, p), mesh_impl.laid_out_pnum())


def all_reduce_fn(mesh_impl: Any, group_sum: GroupSum = add_n, one_group: bool = True) -> SumFn:
    """Returns the function that sums on a mesh.

    A SIMD mesh has one algorithm only, and `one_group` is as for `simd_all_reduce`.
    """
    if is_simd(mesh_impl):
        return lambda values, groups, turns: simd_all_reduce(mesh_impl, values, groups, one_group)
    return lambda values, groups, turns: [
        placement_all_reduce(mesh_impl, x, groups, turn, group_sum)
        for x, turn in zip(values, turns)
    ]
