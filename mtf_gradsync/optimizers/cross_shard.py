"""CrossShardOptimizer: reduces all gradients together over the shards of a mesh."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Sequence

import gin
import numpy as np

from mtf_gradsync import compat_v1
from mtf_gradsync._common import map_by_key
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.compat_v1 import NOT_GIVEN, OptimizerLike, given_optimizer, is_v1
from mtf_gradsync.gradients.arguments import PassedOnArguments
from mtf_gradsync.gradients.operations import (
    GradientOperation,
    map_by_mesh,
    map_present,
    reduced_values,
)
from mtf_gradsync.gradients.pending import PendingSums
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ProcessorGroups, ReplicaAxes
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet
from mtf_gradsync.optimizers.pipeline.stack import Place, Stage
from mtf_gradsync.optimizers.pipeline.words import About, Line
from mtf_gradsync.optimizers.wrapper import CommonArguments, Wrapper
from mtf_gradsync.reduce import Strategy

Reduction = tf.losses.Reduction


@dataclasses.dataclass(frozen=True)
class _ReduceOverShards(Stage):
    """The stage that reduces gradients over the shards.

    If each shard has its own copy of a variable, the gradients of the copies are summed by this
    stage, within groups of shards.
    """

    wrapper: CrossShardOptimizer
    place: Place
    gives = Form.REDUCED

    def check(
        self,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
        arguments: PassedOnArguments,
    ) -> None:
        del arguments
        present = [v for g, v in zip(grads, variables) if g is not None]
        self.wrapper._check_variables(present, self.place)

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        del step
        wrapper, place = self.wrapper, self.place
        pairs = list(zip(gradients.grads, gradients.variables))
        copies = [g if g is not None and self._sums(v) else None for g, v in pairs]

        def sum_copies(mesh: mtf.Mesh, present: list[mtf.Tensor]) -> Sequence[mtf.Tensor]:
            del mesh
            dims = [wrapper._shard_dims(g.shape, place) for g in present]
            return SumCopies(present, dims, wrapper._groups, wrapper.reducer).outputs

        sums = map_present(copies, lambda present: map_by_mesh(present, sum_copies))
        return gradients.with_grads([g if s is None else s for s, (g, _) in zip(sums, pairs)])

    def _sums(self, variable: mtf.Variable) -> bool:
        """Returns whether this stage sums the gradients of the shards' copies of a variable."""
        around = [stage for one in self.place.around for stage in one.stages]
        others = [stage for stage in around if isinstance(stage, _ReduceOverShards)]
        summed = any(x.wrapper._has_own_copy(variable, x.place) for x in others)
        return self.wrapper._has_own_copy(variable, self.place) and not summed

    def describe(self, about: About) -> list[Line]:
        groups = self.wrapper._groups
        if not any(map(self._sums, about.variables)) and (about.variables or groups is None):
            return []
        where = "over all shards" if groups is None else f"in {len(groups)} groups of shards"
        return [Line(f"sum gradients of the shards' own copies {where}")]


@gin.configurable(module="mtf_gradsync")
class CrossShardOptimizer(Wrapper):
    """A wrapper that sums gradients over the shards, and applies them by another optimizer.

    This wrapper is the mesh counterpart of `tf.compat.v1.tpu.CrossShardOptimizer`. It takes three
    kinds of gradients:

    - A gradient of its variable's shape is pending (not yet reduced, as `mtf.gradients` returns it)
      or already reduced. All pending gradients are reduced together.
    - A gradient per shard, of shape `[shard dims...] + var dims`, is summed over the shard dims,
      the dimensions that number the shards.
    - If a variable has the shard dims itself, each shard has its own copy of the variable. For its
      copy a shard gets the sum of the gradients in its group of shards. With `group_assignment`, a
      variable that all shards share raises ValueError.

    References:
      https://www.tensorflow.org/api_docs/python/tf/compat/v1/tpu/CrossShardOptimizer

    Examples:
      >>> print(gs.describe(gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1))))
      every step  reduce over the replica axes: fused  (CrossShardOptimizer)
                  update by Sgd
    """

    def __init__(
        self,
        opt: OptimizerLike,
        reduction: compat_v1.Reduction = Reduction.MEAN,
        name: str = "CrossShardOptimizer",
        group_assignment: list[list[int]] | None = None,
        learning_rate: Any = NOT_GIVEN,
        axes: ReplicaAxes | None = None,
        mesh_shape: MeshShapeLike | None = None,
        layout: LayoutLike | None = None,
        batch_dims: str | Sequence[str] = ("batch",),
        reducer: Strategy | None = None,
    ) -> None:
        """Wraps an optimizer.

        Args:
          opt: a Mesh-TF optimizer, or a class or factory of one. With an optimizer of
            `tf.compat.v1.train` the result is `compat_v1.CrossShardOptimizer`, and arguments for
            the mesh have no effect. A subclass takes mesh optimizers only.
          reduction: `tf.compat.v1.losses.Reduction.MEAN` or `.SUM`: whether `compute_gradients`
            scales per-shard losses by 1/num_shards (with groups: 1/group size), in any wrapper of
            the stack. Applying gradients always sums.
          name: name of the wrapper.
          group_assignment: groups of shards that sum with each other: equally long lists of shard
            numbers, together a permutation of range(num_shards). None puts all shards into one
            group. Groups are for variables that have the shard dims: each shard has its own copy of
            such a variable. With groups, a gradient of a variable that all shards share is an
            error.
          learning_rate: the learning rate for opt; only if opt is a class or factory.
          axes: the replica axes (`ReplicaAxes`); or give mesh_shape and layout. Without either
            shard dims are recognised by their names.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along, which are
            the names of the shard dims.
          reducer: the reduction strategy; None takes `FusedAllReduce()`.

        Raises:
          ValueError: reduction or group_assignment is invalid, or arguments contradict each other.
          TypeError: opt is a Keras optimizer.
        """
        if reduction not in (Reduction.SUM, Reduction.MEAN):
            raise ValueError(
                "reduction must be tf.compat.v1.losses.Reduction.SUM or .MEAN "
                f"({Reduction.SUM!r} or {Reduction.MEAN!r}), got {reduction!r}."
            )
        groups = check_group_assignment(group_assignment)
        opt = given_optimizer(opt, learning_rate, type(self).__name__)
        if type(self) is CrossShardOptimizer and is_v1(opt):
            arguments = (opt, reduction, name, group_assignment)
            self._turn_into_v1(compat_v1.CrossShardOptimizer, *arguments)
            return
        self._groups, self.loss_reduction = groups, reduction
        self._wrap(opt, CommonArguments(name, axes, mesh_shape, layout, batch_dims, reducer))
        self._check_order()
        if self._groups and self.axes:
            # A processor may hold several shards, so there may be more shards than processors.
            listed = sum(len(group) for group in self._groups)
            self._group_size(max(self.axes.num_shards, listed))

    def stages(self, place: Place) -> list[Stage]:
        return [_ReduceOverShards(self, place)]

    def _group_size(self, num_shards: int) -> int:
        return check_groups_cover(self._groups or [], num_shards)

    def _check_variables(
        self, variables: Sequence[mtf.Variable], place: Place | None = None
    ) -> None:
        others = [w for w in self._wrappers()[1:] if isinstance(w, CrossShardOptimizer)]
        for variable in variables if self._groups or others else ():
            if self._groups and not self._has_own_copy(variable, place):
                raise ValueError(
                    f"group_assignment={self._groups!r} sums within groups of shards, but all "
                    f"shards share the variable {variable.name!r} of shape "
                    f"{variable.shape.to_string}, which would get another value in each group. "
                    "Give the variable the shard dims, or do not give group_assignment."
                )
            sums = self._describe_sums_of_copies(variable, place)
            for other in others if sums else ():
                other_sums = other._describe_sums_of_copies(
                    variable, place and other._place(place.islands, (), place.program)
                )
                if other_sums and (other_sums != sums or other not in self._segment()[0]):
                    raise ValueError(
                        f"{self.name} and {other.name} inside it would both sum the gradients of "
                        f"the copies that shards have of {variable.name!r}, {sums} and "
                        f"{other_sums}: use one of them."
                    )

    def _describe_sums_of_copies(self, variable: mtf.Variable, place: Place | None) -> str:
        """Returns in words which shards add up the gradients of their own copies of a variable.

        The result is "" if all shards share the variable. `place` is the wrapper's place in its
        stack; None if no wrapper is around this one. Raises ValueError if the groups of shards do
        not have every shard.
        """
        if not self._has_own_copy(variable, place):
            return ""
        dims = mtf.Shape(self._shard_dims(variable.shape, place))
        groups = self._groups or [list(range(dims.size))]
        check_groups_cover(groups, dims.size)
        return f"along {dims.dimension_names} in groups {sorted(map(sorted, groups))}"


GroupAssignment = Sequence[Sequence[int]]


def check_group_assignment(group_assignment: Any) -> list[list[int]] | None:
    """Returns groups of shards as lists of shard numbers; None if None or [] was given.

    Raises ValueError if `group_assignment` is not None, and no list of lists of shard numbers.
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

    `group_assignment` has a list for each group: the numbers of its shards, which count from 0 to
    `num_shards` - 1. Raises ValueError unless all groups have the same size and each shard is in
    exactly one group.
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
    """A sum over the shards of each group; each shard gets the sum of its group.

    The operation sums values of variables of which every shard has its own copy.
    """

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        shard_dims: Sequence[Sequence[mtf.Dimension]],
        groups: GroupAssignment | None,
        strategy: Strategy,
    ):
        """Adds the operation, which has an output of the same shape for each of `grads`.

        Args:
          grads: tensors of one mesh, with shard dims.
          shard_dims: the shard dims of each tensor. Shards are numbered in row-major order of these
            dims, whatever the positions of the dims in the tensor are.
          groups: lists of shard numbers; None makes all shards one group.
          strategy: the strategy that reduces.
        """
        self._shard_dims = [list(dims) for dims in shard_dims]
        self._groups = groups
        self._strategy = strategy
        batch_dims = [d.name for dims in self._shard_dims for d in dims]
        PendingSums.declare_use(grads, True, batch_dims, strategy)
        super().__init__(grads, [g.shape for g in grads], name="sum_copies")

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        values = reduced_values(lowering, self.inputs)

        keys = [tuple(dims) for dims in self._shard_dims]
        self.set_outputs(
            lowering, map_by_key(keys, functools.partial(self._sum, mesh_impl, values))
        )

    def _sum(
        self, mesh_impl: Any, all_values: Any, dims: tuple[mtf.Dimension, ...], positions: list[int]
    ) -> list[Any]:
        """Returns a `LaidOutTensor` of the groups' sums for each of the inputs at `positions`.

        The inputs at `positions` have the shard dims `dims`. `all_values` are the lowered values of
        all inputs.
        """
        grads, values = [self.inputs[i] for i in positions], [all_values[i] for i in positions]
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
    """Returns the groups of processors that have to reduce to make the sums of shards' groups.

    The function is for meshes on which each processor belongs to one shard. `dims` are the shard
    dims, and `mesh_axes` has for each of them the mesh axis that splits it. `groups` are lists of
    shard numbers.
    """
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
    """Sums over groups of shards on meshes where a processor holds several shards.

    Each processor adds up its own shards, group by group. The sums of all groups are then reduced
    over the processors, and each shard takes the sum of its group.

    Args:
      mesh_impl: the mesh.
      mesh_axes: for each of `dims`, the mesh axis that splits it, or None if no axis splits it.
      dims: the shard dims, which all of `grads` have.
      groups: lists of shard numbers.
      grads: the tensors to sum.
      values: the `LaidOutTensor` of each of `grads`.
      strategy: the strategy that reduces.

    Returns:
      A `LaidOutTensor` for each of `grads`, with the shape of this tensor.
    """
    group_of = np.empty([d.size for d in dims], np.int32)
    for number, group in enumerate(groups):
        group_of.reshape([-1])[list(group)] = number
    # group_of is split as the shards are, so that each processor has the groups of its own shards.
    group_numbers = mesh_impl.slicewise(lambda: tf.constant(group_of))
    for tensor_axis, mesh_axis in enumerate(mesh_axes):
        if mesh_axis is not None:
            group_numbers = mesh_impl.allsplit(group_numbers, mesh_axis, tensor_axis)
    group_numbers = mesh_impl.slicewise(lambda x: tf.reshape(x, [-1]), group_numbers)

    def by_group(grad: mtf.Tensor, value: Any) -> Any:
        to_front, _ = _permutations(grad.shape, dims)

        def add_up(x: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
            # Floats narrower than float32 are added up in float32.
            x = tf.cast(x, tf.float32) if x.dtype.size < 4 else x
            x = tf.transpose(x, to_front)
            x = tf.reshape(x, [-1, *x.shape.as_list()[len(dims) :]])
            return tf.math.unsorted_segment_sum(x, numbers, len(groups))

        return mesh_impl.slicewise(add_up, value, group_numbers)

    def of_own_group(grad: mtf.Tensor, totals: Any) -> Any:
        to_front, back = _permutations(grad.shape, dims)
        slice_shape = mesh_impl.slice_shape(grad.shape)

        def pick(x: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
            x = tf.reshape(tf.gather(x, numbers), [slice_shape[i] for i in to_front])
            return tf.cast(tf.transpose(x, back), grad.dtype)

        return mesh_impl.slicewise(pick, totals, group_numbers)

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
