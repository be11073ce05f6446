"""Gradients with a value for each shard: how they are split, reduced, and summed over copies."""

from __future__ import annotations

import functools
from typing import Any, Sequence

import numpy as np

from mtf_gradsync._common import check_flag, map_by_key, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.arguments import check_gradients, check_one_mesh
from mtf_gradsync.gradients.layout import check_batch_dims
from mtf_gradsync.gradients.operations import (
    GradientOperation,
    MaybeGradients,
    gradient_name,
    map_present,
    partial_sum,
    reduce_partial_sums,
    reduced_values,
    reshaped,
    terms_of_processors,
)
from mtf_gradsync.gradients.pending import PendingSums
from mtf_gradsync.gradients.recoverable import check_recoverable
from mtf_gradsync.mesh.axes import ProcessorGroups, ReplicaAxes, check_axes
from mtf_gradsync.reduce import FusedAllReduce, Strategy, check_strategy
from mtf_gradsync.reduce.strategy import has_gradient_reduction
from mtf_gradsync.step import ProgramWrites


def shard_dims_in(shape: mtf.Shape, axes: ReplicaAxes) -> list[mtf.Dimension]:
    """Returns the dims of a shape that have the name of a shard dim of `axes`."""
    names = {d.name for d in axes.shard_dims}
    return [d for d in shape.dims if d.name in names]


class PerShard(GradientOperation):
    """A split of gradients into one per shard, without communication along the replica axes."""

    is_linear = True

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        axes: ReplicaAxes,
        strategy: Strategy,
        accept_summed: bool,
    ):
        self._axes = axes
        self._strategy = strategy
        self._accept_summed = accept_summed
        PendingSums.declare_use(grads, False, [d.name for d in axes.shard_dims], strategy)
        shapes = [mtf.Shape([*axes.free_shard_dims(g.shape), *g.shape.dims]) for g in grads]
        super().__init__(grads, shapes, name="per_shard")

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        self._axes.check_mesh_impl(mesh_impl)
        axis_of = dict(zip(self._axes.shard_dims, self._axes.mesh_axes))
        replica_axes = [
            {axis_of[d] for d in self._axes.free_shard_dims(grad.shape)} for grad in self.inputs
        ]
        no_dims = [()] * len(self.inputs)
        terms = terms_of_processors(lowering, self.inputs, no_dims, replica_axes, self._strategy)
        if not self._accept_summed:
            for grad, axes in zip(self.inputs, replica_axes):
                self._check_not_summed(lowering, grad, axes)
        shapes = [mesh_impl.slice_shape(output.shape) for output in self.outputs]
        self.set_outputs(lowering, [reshaped(mesh_impl, *x) for x in zip(terms, shapes)])

    def _check_not_summed(
        self, lowering: mtf.Lowering, grad: mtf.Tensor, replica_axes: set[int]
    ) -> None:
        """Raises ValueError if an operation that computes a gradient has summed over shards.

        When the graph was built, the gradient was expected to be pending over the mesh axes
        `replica_axes`, so that each shard's term could be read.
        """
        operation = PendingSums.of_lowering(lowering).unexpected_sum(grad, replica_axes)
        if operation is not None:
            raise ValueError(
                f"Per-shard gradients are not recoverable from {gradient_name(grad)}: "
                f"{type(operation).__name__} {operation.name!r} summed over the shards when it was "
                f"lowered on mesh {lowering.mesh_impl(self).shape}. Give accept_summed=True to "
                "take an equal share for each shard."
            )


class SumGradients(GradientOperation):
    """A reduction of pending and per-shard gradients of one mesh; all are reduced together."""

    is_linear = True

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        sum_dims: Sequence[Sequence[mtf.Dimension]],
        strategy: Strategy,
        batch_dims: Sequence[str] | None = None,
    ):
        """Adds the operation, which has an output for each gradient: its sum, without `sum_dims`.

        Args:
          grads: gradients of one mesh.
          sum_dims: for each gradient, the dims to sum over (shard dims). A gradient without such
            dims is reduced if it is pending.
          strategy: the strategy that reduces.
          batch_dims: the names of the dimensions that the batch is split along; None finds them in
            the graph.
        """
        self._sum_dims = [list(dims) for dims in sum_dims]
        self._strategy = strategy
        plain = [g for g, dims in zip(grads, self._sum_dims) if not dims]
        PendingSums.declare_use(plain, True, batch_dims, strategy)
        shapes = [
            mtf.Shape([d for d in g.shape.dims if d not in dims])
            for g, dims in zip(grads, self._sum_dims)
        ]
        super().__init__(grads, shapes, name="sum_gradients")

    def lower(self, lowering: mtf.Lowering) -> None:
        # Gradients without shard dims are pending: their own all-reduce sums them.
        sums = [
            partial_sum(lowering, grad, dims, reduced=not dims)
            for grad, dims in zip(self.inputs, self._sum_dims)
        ]
        mesh_impl = lowering.mesh_impl(self)
        self.set_outputs(lowering, reduce_partial_sums(mesh_impl, sums, self._strategy))


def per_shard(
    grads: MaybeGradients,
    axes: ReplicaAxes,
    reducer: Strategy | None = None,
    accept_summed: bool = False,
) -> list[mtf.Tensor | None]:
    """Returns one gradient per shard, without communication over replica axes.

    Each processor keeps the partial sum that it has. A gradient that does not depend on the batch
    (the gradient of a penalty on weights, say) is divided equally among the shards. If the layout
    splits the dimensions of a gradient over a replica axis (the gradient of an expert, say), the
    gradient gets no shard dim for that axis: each shard holds its own part already.

    Args:
      grads: pending or reduced gradients of shapes `var dims`; None and gradients with shard dims
        pass through.
      axes: the replica axes.
      reducer: the reduction strategy for gradients that are pending over mesh axes other than the
        replica axes; None takes `FusedAllReduce()`.
      accept_summed: what happens if shards' own gradients are not recoverable from a gradient
        (after a clip by the global norm, for example). If true, each shard takes an equal share of
        the gradient; if false, it is an error.

    Returns:
      A list of tensors of shape `[shard dims...] + var dims`, in the dtypes of the gradients;
      their sum over the shard dims is the gradient.

    Raises:
      TypeError: grads or axes are of the wrong type.
      ValueError: shards' gradients are not recoverable (the error names the gradients, and the
        operations that mixed shards), or the batch is split along a dimension that axes lacks.

    Examples:
      >>> mesh = mtf.Mesh(mtf.Graph(), "mesh")
      >>> batch, size = mtf.Dimension("batch", 8), mtf.Dimension("size", 2)
      >>> x = mtf.import_tf_tensor(mesh, tf.ones([8, 2]), [batch, size])
      >>> w = mtf.get_variable(mesh, "w", [size], initializer=tf.ones_initializer())
      >>> grads = mtf.gradients([mtf.reduce_mean(x * w)], [w])
      >>> axes = gs.ReplicaAxes("all:4", "batch:all")
      >>> grads[0].shape, gs.per_shard(grads, axes)[0].shape
      (Shape[size=2], Shape[batch=4, size=2])
    """
    grads = check_gradients(grads)
    check_one_mesh(grads, "per_shard")
    check_axes(axes)
    accept_summed = check_flag("accept_summed", accept_summed)
    strategy = check_strategy(FusedAllReduce() if reducer is None else reducer)
    if not accept_summed:
        check_recoverable(
            [None if g is None or shard_dims_in(g.shape, axes) else g for g in grads], axes
        )
    return split_into_shards(grads, axes, strategy, accept_summed)


def split_into_shards(
    grads: MaybeGradients, axes: ReplicaAxes, strategy: Strategy, accept_summed: bool
) -> list[mtf.Tensor | None]:
    """Returns one gradient per shard, as `per_shard` does, for gradients that it would accept."""
    pending = [None if g is None or shard_dims_in(g.shape, axes) else g for g in grads]

    def make(present: list[mtf.Tensor]) -> Sequence[mtf.Tensor]:
        if accept_summed:
            check_batch_dims(present, axes)
        return PerShard(present, axes, strategy, accept_summed).outputs

    return [new if new is not None else old for new, old in zip(map_present(pending, make), grads)]


def sum_shards(
    grads: MaybeGradients, axes: ReplicaAxes | None = None, reducer: Strategy | None = None
) -> list[mtf.Tensor | None]:
    """Reduces gradients over the shards and all other mesh axes that they are pending over.

    All gradients of a mesh are reduced together. The program's own assignments (`mtf.assign`, an
    optimizer without a wrapper) wait for the sums that were made before them and for the reads of
    all variables, so that no variable is written before all have been read.

    Args:
      grads: gradients of shape `[shard dims...] + var dims`, which are summed over the shard dims,
        or of shape `var dims`, which are reduced if they are pending; None passes through.
      axes: the replica axes; None when no gradient has shard dims.
      reducer: the reduction strategy; None takes `FusedAllReduce()`. A strategy that compresses an
        optimizer's gradients, such as `QuantizedAllReduce`, does not compress here, and warns.

    Returns:
      A list of reduced gradients of shape `var dims`.

    Raises:
      TypeError: grads, axes or reducer are of the wrong type.
    """
    grads = check_gradients(grads)
    if axes is not None:
        check_axes(axes)
    strategy = check_strategy(FusedAllReduce() if reducer is None else reducer)
    if has_gradient_reduction(strategy):
        warn_once(
            f"sum_shards {type(strategy).__name__}",
            "sum_shards does not compress gradients by %s, because the state of this strategy "
            "belongs to the variables of an optimizer: the gradients are reduced as all other sums "
            "are. Give the strategy to a wrapper, such as CrossShardOptimizer(opt, reducer=...).",
            type(strategy).__name__,
        )
    batch_dims = None if axes is None else axes.batch_dims

    def make(present: list[mtf.Tensor]) -> Sequence[mtf.Tensor]:
        sum_dims = [[] if axes is None else shard_dims_in(g.shape, axes) for g in present]
        sums = sum_gradients(present, sum_dims, strategy, batch_dims)
        for mesh in dict.fromkeys(x.mesh for x in sums):
            ProgramWrites.wait_for([x for x in sums if x.mesh is mesh])
        return sums

    return map_present(grads, make)


def sum_gradients(
    grads: Sequence[mtf.Tensor],
    sum_dims: Sequence[Sequence[mtf.Dimension]],
    strategy: Strategy,
    batch_dims: Sequence[str] | None = None,
) -> list[mtf.Tensor]:
    """Returns the sum of each gradient; gradients may be on several meshes.

    All gradients of a mesh are reduced together. The arguments are as for `SumGradients`.
    """

    def of_mesh(mesh: mtf.Mesh, some: list[int]) -> Sequence[mtf.Tensor]:
        del mesh
        dims = [sum_dims[i] for i in some]
        return SumGradients([grads[i] for i in some], dims, strategy, batch_dims).outputs

    return map_by_key([g.mesh for g in grads], of_mesh)


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

        These inputs have the shard dims `dims`. `all_values` are the lowered values of all inputs.
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
    """Returns a numpy array of shape `shape` as a `LaidOutTensor`, split as the layout says."""
    value = mesh_impl.slicewise(lambda: tf.constant(array))
    for tensor_axis, mesh_axis in enumerate(mesh_impl.tensor_layout(shape)):
        if mesh_axis is not None:
            value = mesh_impl.allsplit(value, mesh_axis, tensor_axis)
    return value
