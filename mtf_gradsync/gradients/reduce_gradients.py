"""Reduces gradients by strategies that keep state, or to parts; computes them from their sums."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Sequence

from mtf_gradsync._common import replaced
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import scalar_of, slice_function
from mtf_gradsync.gradients.flow import Flow, linear_positions
from mtf_gradsync.gradients.layout import (
    IDENTITIES,
    Layout,
)
from mtf_gradsync.gradients.operations import (
    GradientOperation,
    PendingSum,
    dims_to_sum,
    partial_sum,
    reduce_partial_sums,
    reduced_values,
    reshaped,
    terms_of_processors,
)
from mtf_gradsync.gradients.pending import PendingSums
from mtf_gradsync.mesh.axes import ProcessorGroups, ReplicaAxes
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.reduce.parts import Cut, Cuts, all_gather, take_parts
from mtf_gradsync.reduce.strategy import PLACEMENT_BUCKET_BYTES, State


class ReduceGradients(GradientOperation):
    """A reduction of gradients by `Strategy.reduce_gradients`, for strategies that keep state.

    Attributes:
      sums: the reduced gradients.
      new_state: pairs of a variable of the strategy's state and the variable's new value.
    """

    takes_pending = True

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        variables: Sequence[mtf.Variable],
        shard_dims: Sequence[mtf.Dimension],
        axes: ReplicaAxes,
        strategy: Strategy,
        state: State,
    ):
        """Adds the operation, whose outputs are the attributes `sums` and `new_state`.

        Args:
          grads: gradients of one mesh, pending or per shard.
          variables: the variable of each gradient.
          shard_dims: those of `axes.shard_dims` whose mesh axes `Strategy.reduce_gradients` reduces
            over. `Strategy.all_reduce` reduces over all other axes.
          axes: the replica axes.
          strategy: the strategy.
          state: the strategy's state: mtf variables or None in nested lists, tuples or
            dictionaries. The first dimensions of the variables may be shard dims, so that each
            shard has its own values.
        """
        self._axes, self._strategy, self._state = axes, strategy, state
        self._mesh_axes = [m for d, m in zip(axes.shard_dims, axes.mesh_axes) if d in shard_dims]
        self._sum_dims = dims_to_sum(grads, variables)
        pending = [g for g, dims in zip(grads, self._sum_dims) if not dims]
        PendingSums.declare_use(pending, False, [d.name for d in axes.shard_dims], strategy)
        held = _present(state)
        self._num_grads = len(grads)
        super().__init__(
            [*grads, *(v.value for v in held)],
            [*(v.shape for v in variables), *(v.shape for v in held)],
            "reduce_gradients",
            [*(g.dtype for g in grads), *(v.activation_dtype for v in held)],
        )
        self.sums = self.outputs[: self._num_grads]
        self.new_state = list(zip(held, self.outputs[self._num_grads :]))

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        self._axes.check_mesh_impl(mesh_impl)
        groups = ProcessorGroups.along(mesh_impl, self._mesh_axes)
        # Each core's term of each gradient, of the shape of the variable's slice.
        grads = self.inputs[: self._num_grads]
        replica_axes = [self._mesh_axes] * len(grads)
        values = terms_of_processors(lowering, grads, self._sum_dims, replica_axes, self._strategy)
        held = iter(
            [self._value_without_shard_dims(lowering, x) for x in self.inputs[self._num_grads :]]
        )
        before = tf.nest.map_structure(lambda v: None if v is None else next(held), self._state)
        sums, after = self._strategy.reduce_gradients(mesh_impl, values, groups, before)
        name = type(self._strategy).__name__
        _check_slices([*sums], values, f"{name}.reduce_gradients returned sums")
        tf.nest.assert_same_structure(before, after)
        new = _present(after)
        _check_slices(new, _present(before), f"{name}.reduce_gradients returned a state")
        shapes = [mesh_impl.slice_shape(variable.shape) for variable, _ in self.new_state]
        laid_out = [reshaped(mesh_impl, *x) for x in zip(new, shapes)]
        self.set_outputs(lowering, [*sums, *laid_out])

    def _value_without_shard_dims(self, lowering: mtf.Lowering, tensor: mtf.Tensor) -> Any:
        """Returns a variable's value as a `LaidOutTensor` whose slices lack the shard dims.

        `tensor` is the value of the variable. The slices of `tensor` have the size 1 along shard
        dims.
        """
        mesh_impl = lowering.mesh_impl(self)
        names = {d.name for d in self._axes.shard_dims}
        sizes = zip(tensor.shape.dims, mesh_impl.slice_shape(tensor.shape))
        shape = [size for dim, size in sizes if dim.name not in names]
        value = lowering.tensors[tensor].to_laid_out_tensor()
        return reshaped(mesh_impl, value, shape)


def _present(state: State) -> list[Any]:
    return [x for x in tf.nest.flatten(state) if x is not None]


def _check_slices(found: Sequence[Any], wanted: Sequence[Any], what: str) -> None:
    """Raises ValueError unless `found` has the dtypes and slice shapes of `wanted`, in order.

    `found` and `wanted` are lists of `LaidOutTensor`. `what` is the beginning of the error, such as
    "LowRankAllReduce.reduce_gradients returned sums".
    """

    def described(values: Sequence[Any]) -> list[str]:
        return [
            f"{x.tensor_list[0].dtype.base_dtype.name}{list(map(int, x.slice_shape))}"
            for x in values
        ]

    if described(found) != described(wanted):
        raise ValueError(
            f"{what} of {described(found)}, but has to return {described(wanted)}, the dtypes and "
            "shapes of its arguments."
        )


def cuts_between(mesh_impl: Any, whole: mtf.Shape, part: mtf.Shape) -> Cuts:
    """Returns the cuts that make parts of shape `part` out of a tensor of shape `whole`.

    There is a `Cut` for each dimension that has another name in `part` and that the mesh splits in
    `part` but not in `whole`.
    """
    before, after = mesh_impl.tensor_layout(whole), mesh_impl.tensor_layout(part)
    return tuple(
        sorted(
            Cut(after[axis], axis)
            for axis, (old, new) in enumerate(zip(whole.dims, part.dims))
            if old.name != new.name and before[axis] is None and after[axis] is not None
        )
    )


class ScatterGradients(GradientOperation):
    """A reduction (reduce-scatter) of gradients, after which each processor has its part."""

    takes_pending = True

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        variables: Sequence[mtf.Variable],
        shapes: Sequence[mtf.Shape],
        axes: ReplicaAxes,
        strategy: Strategy,
    ):
        """Adds the operation, which has an output for each gradient.

        Args:
          grads: gradients of one mesh, pending, reduced or per shard.
          variables: the variable of each gradient.
          shapes: the shape of each output: the variable's, in which some dimensions may have other
            names, which the layout splits. The gradient is cut into parts along these dimensions.
          axes: the replica axes.
          strategy: the strategy that reduces.
        """
        self._wholes = [v.shape for v in variables]
        self._axes, self._strategy = axes, strategy
        self._sum_dims = dims_to_sum(grads, variables)
        # Gradients that are not cut are all-reduced together.
        for reduced in (True, False):
            wanted = [
                g
                for g, dims, old, new in zip(grads, self._sum_dims, self._wholes, shapes)
                if not dims and (old == new) is reduced
            ]
            PendingSums.declare_use(wanted, reduced, axes.batch_dims, strategy)
        super().__init__(grads, shapes, name="scatter_gradients")

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        self._axes.check_mesh_impl(mesh_impl)
        sums, cuts = [], []
        for grad, dims, whole, output in zip(
            self.inputs, self._sum_dims, self._wholes, self.outputs
        ):
            lowered = lowering.tensors[grad]
            is_cut = dims or whole != output.shape
            # A sum that was already reduced for another reader is not sent again.
            is_made = isinstance(lowered, PendingSum) and lowered.sends_nothing
            sums.append(partial_sum(lowering, grad, dims, reduced=is_made or not is_cut))
            cuts.append(cuts_between(mesh_impl, whole, output.shape))
        self.set_outputs(lowering, reduce_partial_sums(mesh_impl, sums, self._strategy, cuts))


def scatter_gradients(
    grads: Sequence[mtf.Tensor],
    variables: Sequence[mtf.Variable],
    shapes: Sequence[mtf.Shape],
    axes: ReplicaAxes,
    strategy: Strategy,
) -> tuple[Sequence[mtf.Tensor], list[mtf.Tensor]]:
    """Reduces gradients over the mesh so that each replica gets its part of every sum.

    The last operations that compute a gradient may be casts and scalings. Then the tensor before
    these operations is reduced, and the casts and scalings are repeated on the part.

    Args:
      grads: gradients of one mesh, pending, reduced or per shard.
      variables: the variable of each gradient.
      shapes: the shape of each part: the variable's, with other names of the dimensions along which
        the gradient is cut into parts.
      axes: the replica axes.
      strategy: the strategy that reduces.

    Returns:
      For each gradient the tensor that was reduced, before casts and scalings; and for each
      gradient its part, a tensor of the shape in `shapes`.
    """
    sources, operations = zip(*map(_before_casts_and_scalings, grads))
    parts = ScatterGradients(sources, variables, shapes, axes, strategy).outputs
    return sources, [functools.reduce(_repeat, some, x) for x, some in zip(parts, operations)]


def _before_casts_and_scalings(grad: mtf.Tensor) -> tuple[mtf.Tensor, list[mtf.Operation]]:
    """Returns the tensor before a gradient's last casts and scalings, and these operations.

    The operations are in the order in which they were applied. The caller reduces the tensor
    before the casts and scalings, and repeats these on each part. Results then have the same bits
    as if gradients were not cut into parts, and sums are sent in the same dtype as by Mesh-TF
    itself.
    """
    operations: list[mtf.Operation] = []
    while _is_cast_or_scale(grad.operation):
        operations.append(grad.operation)
        (grad,) = grad.operation.inputs
    return grad, operations[::-1]


def _is_cast_or_scale(operation: mtf.Operation) -> bool:
    return isinstance(operation, mtf.ScalarMultiplyOperation) or (
        isinstance(operation, mtf.SlicewiseOperation)
        and len(operation.inputs) == len(operation.outputs) == 1
        and operation.inputs[0].shape == operation.outputs[0].shape
        and not operation.unsplittable_dims
        and linear_positions(operation, [0]) is not None
    )


def _repeat(x: mtf.Tensor, operation: mtf.Operation) -> mtf.Tensor:
    """Returns `x` after the same cast or scaling that `operation` applied to another tensor."""
    if isinstance(operation, mtf.ScalarMultiplyOperation):
        return x * scalar_of(operation)
    fn, dtype = slice_function(operation), operation.outputs[0].dtype
    return mtf.slicewise(fn, [x], output_dtype=dtype, splittable_dims=x.shape.dims)


class TakePart(GradientOperation):
    """A cut of a tensor that all processors have: each takes its part, and nothing is sent."""

    def __init__(self, whole: mtf.Tensor, shape: mtf.Shape):
        super().__init__([whole], [shape], name="take_part")

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        (whole,), (part,) = self.inputs, self.outputs
        value = lowering.tensors[whole].to_laid_out_tensor()
        cuts = cuts_between(mesh_impl, whole.shape, part.shape)
        self.set_outputs(lowering, [take_parts(mesh_impl, value, cuts)])


class GatherParts(GradientOperation):
    """An all-gather: each processor gives its parts of tensors, and gets the whole tensors.

    All tensors are gathered by one call of `all_gather`, which can send several tensors in one
    message.
    """

    def __init__(self, parts: Sequence[mtf.Tensor], shapes: Sequence[mtf.Shape]):
        super().__init__(parts, shapes, name="gather_parts")

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        parts = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs]
        cuts = [
            cuts_between(mesh_impl, whole.shape, part.shape)
            for part, whole in zip(self.inputs, self.outputs)
        ]
        self.set_outputs(lowering, all_gather(mesh_impl, parts, cuts, PLACEMENT_BUCKET_BYTES))


class GradientFromSums(NamedTuple):
    """The operations that compute a gradient, linearly, from sums over the shards.

    Attributes:
      grad: the gradient.
      operations: the operations, in order, that compute it from `sums` and `shared`.
      sums: pending (not yet reduced) tensors that the gradient is linear in. Each shard's part of
        them is recoverable.
      shared: further tensors that the gradient is linear in. They do not depend on any shard's
        data: the gradient of a penalty on weights is an example.
    """

    grad: mtf.Tensor
    operations: Sequence[mtf.Operation]
    sums: Sequence[mtf.Tensor]
    shared: Sequence[mtf.Tensor]

    def compute_from(self, sums: Sequence[mtf.Tensor], shared: Sequence[mtf.Tensor]) -> mtf.Tensor:
        """Returns the gradient that the same operations compute from other tensors.

        `sums` and `shared` replace the tensors in the attributes of these names. They have the same
        shapes, in the same order. Pending tensors among them are reduced first.
        """
        return _ComputeAgain(self, [*sums, *shared]).outputs[0]


class _ComputeAgain(GradientOperation):
    """A gradient, computed again from `values` in place of its `sums` and `shared`."""

    def __init__(self, computed: GradientFromSums, values: Sequence[mtf.Tensor]):
        self._result, self._operations = computed.grad, computed.operations
        given = [*computed.sums, *computed.shared]
        made = {*given, *(t for op in self._operations for t in op.outputs)}
        factors = dict.fromkeys(t for op in self._operations for t in op.inputs if t not in made)
        self._replaced = [*given, *factors]
        dtypes = [self._result.dtype]
        super().__init__([*values, *factors], [self._result.shape], "make_again", dtypes)

    def lower(self, lowering: mtf.Lowering) -> None:
        made = {t: lowering.tensors[t] for op in self._operations for t in op.outputs}
        values = dict(zip(self._replaced, reduced_values(lowering, self.inputs)))
        with replaced(lowering.tensors, {**made, **values}):
            for operation in self._operations:
                operation.lower_itself(lowering)
            result = lowering.tensors[self._result].to_laid_out_tensor()
        self.set_outputs(lowering, [result])


def express_by_sums(grad: mtf.Tensor, flow: Flow, layout: Layout) -> GradientFromSums | None:
    """Returns how a gradient is computed, linearly, from recoverable sums; None if it is not.

    `flow` is a forecast of which operations keep sums pending; the gradient is one of its targets.
    `layout` is the layout that the forecast was made with.
    """
    replica_axes = layout.replica_axes(grad.mesh)
    outside = set(grad.graph.operations)

    def is_pending(tensor: mtf.Tensor) -> bool:
        return bool(flow.axes.get(tensor, frozenset()) & replica_axes)

    sums: dict[mtf.Tensor, None] = {}
    shared: dict[mtf.Tensor, None] = {}
    operations: set[mtf.Operation] = set()
    todo, seen = [grad], set()
    while todo:
        tensor = todo.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        operation = tensor.operation
        if tensor is not grad and flow.mixes_shards(tensor) is None:
            if layout.split(tensor) & replica_axes and is_pending(tensor):
                return None
            (sums if is_pending(tensor) else shared)[tensor] = None
            continue
        inputs = operation.inputs
        mixed = [i for i, x in enumerate(inputs) if is_pending(x) or flow.mixes_shards(x)]
        positions = (
            mixed if isinstance(operation, IDENTITIES) else linear_positions(operation, mixed)
        )
        if (
            not mixed
            or positions is None
            or operation not in outside
            or isinstance(operation, (mtf.ScalarAddOperation, mtf.CustomGradientOperation))
            or any(layout.split_over_shards(inputs[i]) for i in positions)
        ):
            return None
        operations.add(operation)
        todo += [inputs[i] for i in positions]
    in_order = [op for op in grad.graph.operations if op in operations]
    return GradientFromSums(grad, in_order, list(sums), list(shared)) if sums else None
