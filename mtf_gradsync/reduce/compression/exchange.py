"""All-to-all and all-gather over groups of processors."""

from __future__ import annotations

from typing import Any

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import cross_replica_gather, cross_replica_rows
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.mesh.topology import memories
from mtf_gradsync.reduce.sums.one_level import in_groups, physical_groups


def all_to_all(mesh_impl: Any, value: Any, groups: ProcessorGroups) -> Any:
    """Sends one row of each processor's slice, ``[size of a group, ...]``, to each of its group.

    The row at a position is for the member there; in the result it is from the member there.
    """
    if is_simd(mesh_impl):
        physical = physical_groups(mesh_impl, groups)
        return mesh_impl.slicewise(lambda x: cross_replica_rows(x, physical), value)

    # Only the rows are copied between devices.
    def exchange(_: int, group: list[int]) -> list[Any]:
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

    return in_groups(mesh_impl, value, groups, exchange)


def all_gather(mesh_impl: Any, value: Any, groups: ProcessorGroups) -> Any:
    """Gives each processor all slices of its group, in group order: ``[size of a group, ...]``.

    On a SIMD mesh it is one AllToAll, which XLA devices run as an all-gather.
    """
    if is_simd(mesh_impl):
        physical = physical_groups(mesh_impl, groups)
        shape = value.slice_shape

        def gather(x: tf.Tensor) -> tf.Tensor:
            rows = cross_replica_gather(tf.reshape(x, [1, -1]), physical, 0)
            return tf.reshape(rows, [groups.group_size, *shape])

        return mesh_impl.slicewise(gather, value)

    def stacked(_: int, group: list[int]) -> list[Any]:
        received: list[Any] = [None] * len(group)
        for members in memories([mesh_impl.devices[p] for p in group]):
            with tf.device(mesh_impl.devices[group[members[0]]]):
                rows = tf.stack([value.tensor_list[p] for p in group])
            for member in members:
                received[member] = rows
        return received

    return in_groups(mesh_impl, value, groups, stacked)
