"""Sums over groups of shards, for variables of which every shard has its own copy."""

from __future__ import annotations

import functools
from typing import Any, Sequence

import numpy as np

from mtf_gradsync._common import by_key
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.operations import GradientOperation, reduced_values
from mtf_gradsync.gradients.pending import PendingSums
from mtf_gradsync.mesh.axes import ProcessorGroups
from mtf_gradsync.reduce import Strategy

GroupAssignment = Sequence[Sequence[int]]


def check_group_assignment(group_assignment: Any) -> list[list[int]] | None:
    """Returns groups of shards as lists of shard numbers; None if None or [] was given.

    Raises ValueError for anything else.
    """
    if group_assignment is None:
        return None
    ok = isinstance(group_assignment, (list, tuple)) and all(
        isinstance(group, (list, tuple))
        and all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in group)
        for group in group_assignment
    )
    if not ok:
        raise ValueError(
            "group_assignment must be a list of lists of shard numbers, such as "
            f"[[0, 1], [2, 3]], got {group_assignment!r}."
        )
    return [[int(i) for i in group] for group in group_assignment] or None


def check_groups_cover(group_assignment: list[list[int]], num_shards: int) -> int:
    """Returns how many shards each group has.

    Raises ValueError unless all groups have the same size and each shard is in exactly one group.
    """
    numbers = [i for group in group_assignment for i in group]
    missing = sorted(set(range(num_shards)) - set(numbers))
    unknown = sorted(set(numbers) - set(range(num_shards)))
    repeated = sorted({i for i in numbers if numbers.count(i) > 1})
    problems = [
        f"{what} {which}"
        for what, which in (("missing", missing), ("unknown", unknown), ("repeated", repeated))
        if which
    ]
    if problems:
        raise ValueError(
            f"group_assignment must be a permutation of range({num_shards}), the shards of this "
            f"mesh, but shards are {', '.join(problems)}: got {group_assignment!r}."
        )
    sizes = {len(group) for group in group_assignment}
    if len(sizes) > 1:
        raise ValueError(
            "The groups of group_assignment must have equal sizes, got sizes "
            f"{[len(group) for group in group_assignment]} in {group_assignment!r}."
        )
    return sizes.pop()


class SumCopies(GradientOperation):
    """A sum over the shards of each group; each shard gets the sum of its group."""

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        shard_dims: Sequence[Sequence[mtf.Dimension]],
        groups: GroupAssignment | None,
        strategy: Strategy,
    ):
        """Adds the operation.

        `shard_dims` has the shard dims of each tensor. Their order numbers the shards, whatever
        their positions in the tensor. If `groups` is None, all shards are one group.
        """
        self._shard_dims = [list(dims) for dims in shard_dims]
        self._groups = groups
        self._strategy = strategy
        batch_dims = [d.name for dims in self._shard_dims for d in dims]
        PendingSums.want(grads, True, batch_dims, strategy)
        super().__init__(grads, [g.shape for g in grads], name="sum_copies")

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        values = reduced_values(lowering, self.inputs)

        keys = [tuple(dims) for dims in self._shard_dims]
        self.set_outputs(lowering, by_key(keys, functools.partial(self._sum, mesh_impl, values)))

    def _sum(
        self, mesh_impl: Any, all_values: Any, dims: tuple[mtf.Dimension, ...], some: list[int]
    ) -> list[Any]:
        """Sums the values at the positions `some`, all of which have the shard dims `dims`."""
        grads, values = [self.inputs[i] for i in some], [all_values[i] for i in some]
        mesh_axes = [mesh_impl.tensor_dimension_to_mesh_axis(d) for d in dims]
        one_each = all(
            axis is not None and mesh_impl.shape[axis].size == d.size
            for d, axis in zip(dims, mesh_axes)
        )
        groups = self._groups or [list(range(mtf.Shape(list(dims)).size))]
        if one_each:
            return self._strategy.all_reduce(
                mesh_impl, values, _processor_groups(mesh_impl, mesh_axes, dims, groups)
            )
        return _sum_several_a_processor(
            mesh_impl, mesh_axes, dims, groups, grads, values, self._strategy
        )


def _processor_groups(
    mesh_impl: Any,
    mesh_axes: Sequence[int],
    dims: Sequence[mtf.Dimension],
    groups: GroupAssignment,
) -> ProcessorGroups:
    """Returns the groups of processors that hold the groups of shards, one shard each."""
    if len(groups) == 1:
        return ProcessorGroups.along(mesh_impl, mesh_axes)
    group_of = {shard: number for number, group in enumerate(groups) for shard in group}
    members: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for processor in range(mesh_impl.size):
        coordinates = mtf.pnum_to_processor_coordinates(mesh_impl.shape, processor)
        shard = mtf.processor_coordinates_to_pnum(
            [d.size for d in dims], [coordinates[axis] for axis in mesh_axes]
        )
        # Processors along the other axes hold other parts of the same copy.
        rest = tuple(c for axis, c in enumerate(coordinates) if axis not in mesh_axes)
        members.setdefault((group_of[shard], rest), []).append(processor)
    return ProcessorGroups([members[key] for key in sorted(members)])


def _sum_several_a_processor(
    mesh_impl: Any,
    mesh_axes: Sequence[int | None],
    dims: Sequence[mtf.Dimension],
    groups: GroupAssignment,
    grads: Sequence[mtf.Tensor],
    values: Sequence[Any],
    strategy: Strategy,
) -> list[Any]:
    """Sums over groups on meshes where a processor holds several shards.

    Each processor adds up its own shards, group by group. The sums of all groups are then reduced
    over the processors, and each shard takes the sum of its group.
    """
    group_of = np.empty([d.size for d in dims], np.int32)
    for number, group in enumerate(groups):
        group_of.reshape([-1])[list(group)] = number
    # group_of is split as the shards are, so that each processor has the groups of its own shards.
    mine = mesh_impl.slicewise(
        lambda x: tf.reshape(x, [-1]), _split_constant(mesh_impl, group_of, mtf.Shape(list(dims)))
    )

    def by_group(grad: mtf.Tensor, value: Any) -> Any:
        to_front, _ = _permutations(grad.shape, dims)

        def add_up(x: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
            # Floats narrower than float32 are added up in float32.
            x = tf.cast(x, tf.float32) if x.dtype.size < 4 else x
            x = tf.transpose(x, to_front)
            x = tf.reshape(x, [-1, *x.shape.as_list()[len(dims) :]])
            return tf.math.unsorted_segment_sum(x, numbers, len(groups))

        return mesh_impl.slicewise(add_up, value, mine)

    def of_own_group(grad: mtf.Tensor, totals: Any) -> Any:
        to_front, back = _permutations(grad.shape, dims)
        slice_shape = mesh_impl.slice_shape(grad.shape)

        def pick(x: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
            x = tf.reshape(tf.gather(x, numbers), [slice_shape[i] for i in to_front])
            return tf.cast(tf.transpose(x, back), grad.dtype)

        return mesh_impl.slicewise(pick, totals, mine)

    totals = [by_group(grad, value) for grad, value in zip(grads, values)]
    split_axes = [axis for axis in mesh_axes if axis is not None]
    if split_axes:
        processors = ProcessorGroups.along(mesh_impl, split_axes)
        totals = strategy.all_reduce(mesh_impl, totals, processors)
    return [of_own_group(grad, total) for grad, total in zip(grads, totals)]


def _permutations(shape: mtf.Shape, dims: Sequence[mtf.Dimension]) -> tuple[list[int], list[int]]:
    """Returns the permutation that moves `dims` to the front of a shape, and its inverse."""
    first = [shape.dims.index(d) for d in dims]
    to_front = first + [i for i in range(shape.ndims) if i not in first]
    return to_front, [to_front.index(i) for i in range(shape.ndims)]


def _split_constant(mesh_impl: Any, array: np.ndarray, shape: mtf.Shape) -> Any:
    """Returns a numpy array as a `LaidOutTensor`, split as the layout splits `shape`."""
    value = mesh_impl.slicewise(lambda: tf.constant(array))
    for tensor_axis, mesh_axis in enumerate(mesh_impl.tensor_layout(shape)):
        if mesh_axis is not None:
            value = mesh_impl.allsplit(value, mesh_axis, tensor_axis)
    return value
