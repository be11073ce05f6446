"""One sum over groups of processors, on a placement mesh and on a SIMD mesh."""

from __future__ import annotations

import functools
from typing import Any, Sequence

from mtf_gradsync._tf_compat import mtf, tf
from mtf_gradsync.reduce.groups import ProcessorGroups

# Sums of these are kept in float32 until the last addition is done.
_NARROW_FLOATS = (tf.bfloat16, tf.float16)


def is_simd(mesh_impl: Any) -> bool:
    """Whether one program stands for all processors, so that tensors have a single slice."""
    return isinstance(mesh_impl, mtf.simd_mesh_impl.SimdMeshImpl)


def simd_all_reduce(mesh_impl: Any, value: Any, groups: ProcessorGroups) -> Any:
    """Sums over groups by one CrossReplicaSum.

    Groups along mesh axes go through Mesh-TF's own all-reduce, and with it its rule that every
    dtype but float32 (and bfloat16 in groups of at most 8) crosses the mesh as float32.
    """
    if groups.mesh_axes is not None:
        return mesh_impl.allreduce(value, list(groups.mesh_axes), "SUM")
    physical = [[mesh_impl.l2p(p) for p in group] for group in groups.groups]

    def cross_replica_sum(x: tf.Tensor) -> tf.Tensor:
        wire = x if x.dtype == tf.float32 else tf.cast(x, tf.float32)
        return tf.cast(tf.tpu.cross_replica_sum(wire, physical), x.dtype)

    return mesh_impl.slicewise(cross_replica_sum, value)


def sum_on_one_device(slices: Sequence[tf.Tensor], device: str) -> tf.Tensor:
    """Adds up slices on one device, in their order.

    One addition over all slices is one pass over memory, where a ring takes a step per device;
    bfloat16 and float16 are summed in float32. TensorFlow itself sends the sum once to each
    device that reads it.
    """
    dtype = slices[0].dtype
    narrow = dtype in _NARROW_FLOATS
    with tf.device(device):
        total = tf.add_n([tf.cast(x, tf.float32) if narrow else x for x in slices])
        return tf.cast(total, dtype) if narrow else total


def placement_all_reduce(mesh_impl: Any, value: Any, groups: ProcessorGroups, turn: int) -> Any:
    """Sums over groups of a placement mesh, each on one of its devices.

    Args:
      mesh_impl: a `PlacementMeshImpl`.
      value: a `LaidOutTensor`.
      groups: the processors that sum with each other.
      turn: which member of the group adds up, counted round; calls that count up spread the
        work over the devices.

    Returns:
      A `LaidOutTensor`.
    """
    slices = value.tensor_list
    result: list[Any] = [None] * len(slices)
    for number, group in enumerate(groups.groups):
        root = group[(turn + number) % len(group)]
        total = sum_on_one_device([slices[p] for p in group], mesh_impl.devices[root])
        for processor in group:
            result[processor] = total
    return mesh_impl.LaidOutTensor(result)


def all_reduce_fn(mesh_impl: Any) -> Any:
    """The function (value, groups, turn) -> value that sums on this kind of mesh."""
    if is_simd(mesh_impl):
        return lambda value, groups, turn: simd_all_reduce(mesh_impl, value, groups)
    return functools.partial(placement_all_reduce, mesh_impl)
