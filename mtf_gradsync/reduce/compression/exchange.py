"""All-to-all and all-gather over groups of processors."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import cross_replica_gather, cross_replica_rows
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.mesh.shared_copies import first_alike
from mtf_gradsync.mesh.topology import memories


def all_to_all(mesh_impl: Any, value: Any, groups: ProcessorGroups) -> Any:
    """Sends one row of each processor's slice to each member of its group.

    Slices are ``[size of a group, ...]``. The row at a position is for the member there; in the
    result it is from the member there. On a SIMD mesh it is one AllToAll; on a placement mesh only
    the rows are copied between devices.
    """
    if is_simd(mesh_impl):
        physical = _physical(mesh_impl, groups)
        return mesh_impl.slicewise(lambda x: cross_replica_rows(x, physical), value)

    def exchange(group: list[int]) -> list[Any]:
        rows = mtf.parallel(
            [mesh_impl.devices[p] for p in group],
            lambda x: tf.unstack(x, axis=0),
            [value.tensor_list[p] for p in group],
        )
        received = []
        for position, processor in enumerate(group):
            with tf.device(mesh_impl.devices[processor]):
                received.append(tf.stack([sent[position] for sent in rows]))
        return received

    return _in_groups(mesh_impl, value, groups, exchange)


def all_gather(mesh_impl: Any, value: Any, groups: ProcessorGroups) -> Any:
    """Sends each processor's slice to all members of its group.

    On a SIMD mesh it is one AllToAll, which XLA devices run as an all-gather; on a placement mesh
    the slices are stacked once in each memory.

    Returns:
      A `LaidOutTensor` with slices `[size of a group, ...]`, in the order of the group.
    """
    if is_simd(mesh_impl):
        physical = _physical(mesh_impl, groups)
        shape = value.slice_shape

        def gather(x: tf.Tensor) -> tf.Tensor:
            rows = cross_replica_gather(tf.reshape(x, [1, -1]), physical, 0)
            return tf.reshape(rows, [groups.group_size, *shape])

        return mesh_impl.slicewise(gather, value)

    def stacked(group: list[int]) -> list[Any]:
        received: list[Any] = [None] * len(group)
        for members in memories([mesh_impl.devices[p] for p in group]):
            with tf.device(mesh_impl.devices[group[members[0]]]):
                rows = tf.stack([value.tensor_list[p] for p in group])
            for member in members:
                received[member] = rows
        return received

    return _in_groups(mesh_impl, value, groups, stacked)


def positions(mesh_impl: Any, groups: ProcessorGroups) -> Any:
    """Returns each processor's position in its group, a `LaidOutTensor` of int32 scalars."""
    at = [0] * mesh_impl.size
    for group in groups.groups:
        for position, processor in enumerate(group):
            at[processor] = position
    if not is_simd(mesh_impl):
        return mesh_impl.LaidOutTensor(at)
    return mesh_impl.slicewise(lambda p: tf.gather(at, p), mesh_impl.laid_out_pnum())


def _physical(mesh_impl: Any, groups: ProcessorGroups) -> list[list[int]]:
    return [[mesh_impl.l2p(p) for p in group] for group in groups.groups]


def _in_groups(
    mesh_impl: Any,
    value: Any,
    groups: ProcessorGroups,
    exchange: Callable[[list[int]], Sequence[Any]],
) -> Any:
    """Runs an exchange in each group; groups with the same slices in the same memory share it."""
    slices = value.tensor_list
    result: list[Any] = [None] * len(slices)
    first = first_alike(mesh_impl, slices, groups.groups)
    for number, group in enumerate(groups.groups):
        if first[number] is group:
            received = exchange(group)
        else:
            received = [result[twin] for twin in first[number]]
        for processor, one in zip(group, received):
            result[processor] = one
    return mesh_impl.LaidOutTensor(result)
