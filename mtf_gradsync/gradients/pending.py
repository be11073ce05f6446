"""Leaves sums over the mesh pending (not reduced) up to the gradients; reduces them together."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import (
    Any,
    Callable,
    Collection,
    ContextManager,
    Iterator,
    Mapping,
    NamedTuple,
    Sequence,
)

from mtf_gradsync._common import replaced, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import (
    loop_body,
    loop_condition,
    scalar_of,
    set_operation_outputs,
)
from mtf_gradsync.gradients.flow import (
    Cause,
    Flow,
    Use,
    sums_before_broadcast,
)
from mtf_gradsync.gradients.layout import Axes, Layout, batch_axes
from mtf_gradsync.gradients.operations import (
    GradientOperation,
    PartialSum,
    PendingSum,
    current_context,
    equal_shares,
    gradient_name,
    reduce_partial_sums,
)
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step.plan import ExtensionLowering, PlanExtension, StepPlan, flat


class Bucket(NamedTuple):
    """A mark of pending sums: those with an equal bucket are reduced together.

    Attributes:
      strategy: the reduction strategy of the sums.
      by_program: whether only operations of the program itself use the sums, and no wrapper does.
        Such sums are reduced apart from others, because the program may not use them on every step.
    """

    strategy: Strategy
    by_program: bool


# The methods that communicate; all others of `mtf.MeshImpl` are made of these.
_COLLECTIVES = ("allreduce", "allconcat", "alltoall", "receive", "shift_by_n_processors")


@contextlib.contextmanager
def _warning_of_missing_sum(
    operation: mtf.Operation, lowering: mtf.Lowering, cause: Cause, target: mtf.Tensor
) -> Iterator[None]:
    """Returns a context for lowering `operation`; warns at its end if a sum over shards is missing.

    A sum is missing if each shard has other values of a gradient, and the program does not add them
    up. `target` is a gradient that is computed by the operation and needs the sum; the warning
    names it. `cause` is the reason to expect that the sum is missing. With `Cause.DROPS_SUM`, the
    operation drops a dimension that the shards split, and the warning is always logged. With
    `Cause.GATHERS`, the operation gathers values of all shards and may make the sum itself: there
    is no warning if it communicated while it was lowered, or if it left its output pending.
    """
    with _record_collectives(lowering.mesh_impl(operation)) as sent:
        yield
    is_left = any(
        isinstance(lowering.tensors.get(t), mtf.LazyAllreduceSum) for t in operation.outputs
    )
    if cause is Cause.DROPS_SUM or not (sent or is_left):
        warn_once(
            f"unsummed {operation.name}",
            "%s %r drops a dimension that the shards split, and nothing sums over it: each "
            "shard has other values of %s, and the replicas of its variable differ after an "
            "update. Keep that dimension in the result, with the size of its mesh axis, and "
            "sum over it with mtf.reduce_sum.",
            type(operation).__name__,
            operation.name,
            gradient_name(target),
        )


@contextlib.contextmanager
def _record_collectives(mesh_impl: Any) -> Iterator[list[str]]:
    """Returns a context that records which collective methods of a mesh are called inside of it.

    The value of the context is a list, to which each call adds the method's name, such as
    "allreduce".
    """
    sent: list[str] = []

    def noting(name: str) -> Any:
        made = getattr(mesh_impl, name)

        def make(*args: Any, **kwargs: Any) -> Any:
            sent.append(name)
            return made(*args, **kwargs)

        return make

    names = [name for name in _COLLECTIVES if hasattr(mesh_impl, name)]
    for name in names:
        vars(mesh_impl)[name] = noting(name)
    try:
        yield sent
    finally:
        for name in names:
            del vars(mesh_impl)[name]


class PendingLowering(ExtensionLowering):
    """Lowers operations on pending (not yet reduced) sums, during one lowering of a graph.

    Attributes:
      flow: the forecast of which operations keep sums pending.
    """

    def __init__(
        self,
        lowering: mtf.Lowering,
        flow: Flow,
        buckets: dict[mtf.Tensor, Bucket],
        missing: Mapping[mtf.Operation, tuple[Cause, mtf.Tensor]],
    ):
        """Begins a lowering.

        Args:
          lowering: the lowering.
          flow: the forecast of which operations keep sums pending.
          buckets: the bucket of each tensor whose parts have to be added up over the mesh. Sums
            with equal buckets are reduced together. The dictionary is changed during the lowering.
          missing: operations that drop or gather a dimension which the shards split, so that the
            program may lack a sum over the shards. A warning is logged when such an operation is
            lowered and no sum was made. The value of an operation is a pair from
            `Flow.missing_sums`: the cause, which says whether the dimension is dropped
            (`Cause.DROPS_SUM`) or gathered (`Cause.GATHERS`), and a gradient that is computed by
            the operation and needs the sum. The warning names this gradient.
        """
        self.flow = flow
        self._lowering = lowering
        self._buckets = buckets
        self._missing = missing
        # Mesh axes that an operation was expected to leave pending, and has summed over.
        self._differs: dict[mtf.Operation, Axes] = {}

    def lower(self, operation: mtf.Operation) -> bool:
        if isinstance(operation, GradientOperation):
            return False  # it handles pending sums itself
        if isinstance(operation, mtf.WhileLoopOperation):
            self._reduce_captured(operation)
        if operation not in self.flow.operations:
            needed = [self._must_be_reduced(operation, t) for t in self._pending_inputs(operation)]
            if any(needed):
                self._lower(operation, None)
            return any(needed)
        shape = sums_before_broadcast(operation)
        found = self._missing.get(operation)
        watch = _warning_of_missing_sum(operation, self._lowering, *found) if found else None
        with watch or contextlib.nullcontext():
            if shape is None:
                self._lower(operation, self.flow.uses.get(operation))
            else:
                self._sum_and_broadcast(operation, shape)
        for tensor in operation.outputs:
            self._note_summed(
                operation, self.flow.axes.get(tensor, Axes()) - self._pending_axes(tensor)
            )
        for tensor in self.flow.carried.intersection(operation.outputs):
            # Mesh-TF would carry each processor's part into the next iteration.
            self._tensors[tensor] = self._tensors[tensor].to_laid_out_tensor()
        return True

    def unexpected_sum(
        self, tensor: mtf.Tensor, mesh_axes: Collection[int]
    ) -> mtf.Operation | None:
        """Returns an operation that computes `tensor` and has summed over mesh axes too early.

        The forecast said that the operation's result would stay pending over some of `mesh_axes`,
        but when the operation was lowered, it summed over one of these axes. The result is None if
        there is no such operation.
        """
        for operation in self.flow.operations_before(tensor) if self._differs else ():
            if self._differs.get(operation, Axes()).intersection(mesh_axes):
                return operation
        return None

    def _must_be_reduced(self, operation: mtf.Operation, tensor: mtf.Tensor) -> bool:
        """Returns whether the pending input `tensor` is reduced before Mesh-TF lowers `operation`.

        If the result is false, Mesh-TF gets the pending input as it is.
        """
        # tf.gradients cannot take a pending sum; Mesh-TF would use the parts of a derived one.
        return isinstance(operation, mtf.GenericGradOperation) or self.flow.is_derived(tensor)

    def _lower(self, operation: mtf.Operation, use: Use | None) -> None:
        """Lowers an operation.

        `use` says how the operation computes with pending inputs so that its results stay pending;
        if `use` is None, the operation takes reduced inputs. A sum that Mesh-TF itself leaves
        pending becomes a `PendingSum` in any case.
        """
        pending = self._pending_inputs(operation)
        if use is not None and pending:
            self._keep_results_pending(operation, use)
            return
        reduced = {
            t: self._tensors[t].to_laid_out_tensor()
            for t in pending
            if self._must_be_reduced(operation, t)
        }
        with replaced(self._tensors, reduced):
            operation.lower_itself(self._lowering)
        self._keep_pending(operation)

    def _sum_and_broadcast(self, operation: mtf.Operation, shape: mtf.Shape) -> None:
        """Lowers an einsum that has output dimensions which no input has.

        The einsum is lowered as two operations: an einsum whose result has the shape `shape`,
        without the new dimensions, and a broadcast of this result to the new dimensions.
        """
        (output,) = operation.outputs
        first = copy.copy(operation)
        small = mtf.Tensor(first, shape, output.dtype)
        set_operation_outputs(first, [small])
        if output in self._buckets:  # the small sum is reduced instead, as there is less to send
            self._buckets[small] = self._buckets.pop(output)
        self._lower(first, self.flow.uses.get(operation))
        mesh_impl = self._lowering.mesh_impl(operation)

        def broadcast(value: Any) -> Any:
            return mesh_impl.broadcast_impl(value.to_laid_out_tensor(), shape, output.shape)

        if output not in self.flow.axes or not self._pending_axes(small):
            self._tensors[output] = broadcast(self._tensors[small])
            return
        self._tensors[output] = PendingSum(
            mesh_impl,
            sorted(self._pending_axes(small)),
            lambda: broadcast(self._tensors[small].laid_out_input),
            lambda x: x.set_reduced(broadcast(self._tensors[small])),
            mesh_impl.slice_shape(output.shape),
            sources=[self._tensors[small]],
        )

    def _pending_axes(self, tensor: mtf.Tensor) -> Axes:
        """Returns the mesh axes that a lowered tensor is pending over; an empty set if none."""
        lowered = self._tensors.get(tensor)
        return Axes(lowered.mesh_axes if isinstance(lowered, mtf.LazyAllreduceSum) else ())

    def _note_summed(self, operation: mtf.Operation, axes: Axes) -> None:
        if axes:
            self._differs[operation] = self._differs.get(operation, Axes()) | axes

    def inside_branch(self) -> ContextManager[None]:
        """Returns a context for building a branch; sums made inside are not used outside of it."""
        copies = {
            tensor: copy.copy(lowered)
            for tensor, lowered in self._tensors.items()
            if isinstance(lowered, PendingSum) and not lowered.is_complete
        }
        return replaced(self._tensors, copies)

    @property
    def _tensors(self) -> dict[mtf.Tensor, Any]:
        return self._lowering.tensors

    def _pending_inputs(self, operation: mtf.Operation) -> list[mtf.Tensor]:
        return [
            t
            for t in dict.fromkeys(operation.inputs)
            if isinstance(self._tensors.get(t), mtf.LazyAllreduceSum)
        ]

    def _reduce_captured(self, loop: mtf.WhileLoopOperation) -> None:
        """Reduces, outside of a loop, the pending sums that the loop reads.

        A sum that is reduced outside of the loop can be read inside of the loop and outside of it.
        A sum that is reduced inside of the loop could only be read there.
        """
        inner = flat([*loop_condition(loop).operations, *loop_body(loop).operations])
        for tensor in dict.fromkeys(t for op in inner for t in op.inputs):
            lowered = self._tensors.get(tensor)
            if isinstance(lowered, PendingSum):
                lowered.to_laid_out_tensor()

    # Sums that Mesh-TF leaves pending.

    def _keep_pending(self, operation: mtf.Operation) -> None:
        for tensor in operation.outputs:
            lazy = self._tensors.get(tensor)
            if isinstance(lazy, mtf.LazyAllreduceSum) and not isinstance(lazy, PendingSum):
                self._tensors[tensor] = self._pending(tensor, lazy)

    def _pending(self, tensor: mtf.Tensor, lazy: mtf.LazyAllreduceSum) -> PendingSum:
        parts = lazy.laid_out_input.to_laid_out_tensor()
        return PendingSum(
            lazy.mesh_impl,
            sorted(lazy.mesh_axes),  # Mesh-TF adds pending sums only if their axes are in one order
            lambda: parts,
            self._sum_function(tensor),
            parts.slice_shape,
            lazy.add_counter_fn,
        )

    def _sum_function(self, tensor: mtf.Tensor) -> Callable[[PendingSum], None]:
        """Returns the function that reduces `tensor`, for the constructor of its `PendingSum`.

        The `PendingSum` calls the function with itself when the sum is first needed. The function
        adds up the parts, and stores the sum in the `PendingSum`. If `tensor` is in a bucket, the
        function also reduces all other sums that `_unreduced_sums` finds in the bucket.
        """

        def make(one: PendingSum) -> None:
            bucket = self._buckets.get(tensor)
            if bucket is None:
                one.set_reduced(one.mesh_impl.allreduce(one.laid_out_input, one.mesh_axes, "SUM"))
                return
            sums = self._unreduced_sums(one, bucket)
            parts = [PartialSum(x.laid_out_input, tuple(sorted(x.mesh_axes))) for x in sums]
            for x, value in zip(sums, reduce_partial_sums(one.mesh_impl, parts, bucket.strategy)):
                x.set_reduced(value)

        return make

    def _unreduced_sums(self, one: PendingSum, bucket: Bucket) -> list[PendingSum]:
        """Returns the sums to reduce together with `one`, a sum of the bucket; `one` is among them.

        The returned sums are those of the bucket that are not reduced yet, and that are on the same
        mesh and in the same graph, branch or loop as `one`.
        """
        found = {}
        for tensor, other in self._buckets.items():
            lowered = self._tensors.get(tensor)
            if (
                other == bucket
                and isinstance(lowered, PendingSum)
                and not lowered.is_reduced
                and lowered.context == one.context
                and lowered.mesh_impl is one.mesh_impl
            ):
                found[id(lowered)] = lowered
        return list({**found, id(one): one}.values())

    # Sums that stay pending through an operation.

    def _keep_results_pending(self, operation: mtf.Operation, use: Use) -> None:
        lowering = self._lowering
        mesh_impl = lowering.mesh_impl(operation)
        home = current_context()
        kept: dict[tuple[str, Any], list[Any]] = {}

        def made_once(form: str, make: Callable[[], list[Any]]) -> list[Any]:
            """Returns the result of `make`, and keeps it for later calls with the same `form`.

            A kept result is returned if it was made in the current graph, loop or branch. So is a
            result that was made in the graph, loop or branch where the operation was first lowered.
            In all other cases `make` is called. `form` says what `make` returns: "parts" are the
            parts of all outputs, "reduced" are their sums.
            """
            here = current_context()
            if (form, home) in kept:
                return kept[form, home]
            if (form, here) not in kept:
                kept[form, here] = make()
            return kept[form, here]

        def parts(number: int) -> Any:
            value = made_once("parts", lambda: self._parts(operation, use))[number]
            axes: Axes = Axes()
            if isinstance(value, mtf.LazyAllreduceSum):
                axes, value = Axes(value.mesh_axes), value.laid_out_input.to_laid_out_tensor()
            self._note_summed(operation, use.summed_axes - axes)
            return equal_shares(mesh_impl, value, use.summed_axes - axes)

        def lower_on_sums() -> list[Any]:
            sums = {t: self._tensors[t].to_laid_out_tensor() for t in operation.inputs}
            return self._lowered(operation, sums)

        def reduce(number: int, one: PendingSum) -> None:
            one.set_reduced(made_once("reduced", lower_on_sums)[number].to_laid_out_tensor())

        sources = [] if use.reduces_results else [self._tensors[t] for t in operation.inputs]
        for number, tensor in enumerate(operation.outputs):
            is_new = use.reduces_results
            make = self._sum_function(tensor) if is_new else functools.partial(reduce, number)
            self._tensors[tensor] = PendingSum(
                mesh_impl,
                sorted(use.axes | use.summed_axes),
                functools.partial(parts, number),
                make,
                mesh_impl.slice_shape(tensor.shape),
                sources=sources,
            )

    def _parts(self, operation: mtf.Operation, use: Use) -> list[Any]:
        """Returns each processor's parts of an operation's outputs, in order, as lowered tensors.

        The parts of the outputs are computed from the parts of the inputs at `use.positions`, and
        from the reduced values of all other inputs.
        """
        inputs = self._parts_of_inputs(operation, use)
        if not isinstance(operation, mtf.ScalarAddOperation):
            return self._lowered(operation, inputs)
        mesh_impl = self._lowering.mesh_impl(operation)
        count = mtf.Shape([mesh_impl.shape.dims[axis] for axis in use.axes]).size
        scalar = scalar_of(operation)

        def add(x: tf.Tensor) -> tf.Tensor:
            return x + tf.cast(scalar, x.dtype) / tf.cast(count, x.dtype)

        return [mesh_impl.slicewise(add, inputs[operation.inputs[0]])]

    def _parts_of_inputs(self, operation: mtf.Operation, use: Use) -> dict[mtf.Tensor, Any]:
        """Returns the lowered values of inputs that the parts of an operation's outputs need.

        For the inputs at `use.positions`, which the operation is linear in, the values are parts.
        For all other inputs, the values are reduced.
        """
        mesh_impl = self._lowering.mesh_impl(operation)
        found: dict[mtf.Tensor, Any] = {}
        for position, tensor in enumerate(operation.inputs):
            lowered = self._tensors[tensor]
            if position not in use.positions:
                found.setdefault(tensor, lowered.to_laid_out_tensor())
                continue
            axes: set[int] = set()
            value = lowered
            if isinstance(lowered, mtf.LazyAllreduceSum):
                axes, value = set(lowered.mesh_axes), lowered.laid_out_input
                first = sorted(axes - use.axes)
                if first:
                    value = mesh_impl.allreduce(value.to_laid_out_tensor(), first, "SUM")
            found[tensor] = equal_shares(mesh_impl, value, use.axes - axes)
        return found

    def _lowered(self, operation: mtf.Operation, inputs: dict[mtf.Tensor, Any]) -> list[Any]:
        """Lowers an operation with the lowered values `inputs` of its inputs.

        Returns the lowered values of the operation's outputs. After the call, the lowering has the
        values for the inputs and outputs that it had before the call.
        """
        outputs = operation.outputs
        before = {t: self._tensors.get(t) for t in outputs}
        lowered = StepPlan.of(operation.graph).lowering_state(self._lowering)
        with replaced(self._tensors, inputs), lowered.name_scope(operation.name):
            operation.lower_itself(self._lowering)
        values = [self._tensors[t] for t in outputs]
        for tensor, old in before.items():
            self._tensors[tensor] = old
        return values


class _DeclaredUse(NamedTuple):
    """Gradients that a wrapper uses, as `PendingSums.declare_use` was told.

    Attributes:
      tensors: the gradients.
      reduced: whether the wrapper needs them reduced.
      batch_dims: the names of the dimensions that the batch is split along; None finds them in the
        graph.
      strategy: the strategy that reduces the sums.
      are_sums: whether the tensors are themselves sums over mesh axes.
    """

    tensors: tuple[mtf.Tensor, ...]
    reduced: bool
    batch_dims: tuple[str, ...] | None
    strategy: Strategy
    are_sums: bool


class PendingSums(PlanExtension):
    """The plan extension that keeps sums pending, and reduces them together."""

    def __init__(self) -> None:
        self._declared: tuple[_DeclaredUse, ...] = ()

    @classmethod
    def declare_use(
        cls,
        tensors: Sequence[mtf.Tensor],
        reduced: bool,
        batch_dims: Sequence[str] | None,
        strategy: Strategy,
        are_sums: bool = False,
    ) -> None:
        """Declares, before the graph is lowered, that an operation will use gradients of one mesh.

        Operations that are declared in this way may need reduced sums. All of these sums are
        reduced together, when the first operation that needs one of them is lowered. This first
        operation may be one of the model's.

        Args:
          tensors: the gradients.
          reduced: whether the operation needs them reduced; if false, it uses them as they are.
          batch_dims: the names of the dimensions that the batch is split along; None finds them in
            the graph.
          strategy: the strategy that reduces the sums.
          are_sums: whether the tensors are themselves sums over mesh axes, and are to be reduced
            together in any case. If false, tensors that the layout splits so that each shard has a
            slice of its own are left to Mesh-TF, which reduces them one by one.
        """
        if not tensors:
            return
        plan = StepPlan.of(tensors[0].graph)
        plan.adopt()
        pending = plan.extension(cls)
        names = None if batch_dims is None else tuple(batch_dims)
        pending._declared += (_DeclaredUse(tuple(tensors), reduced, names, strategy, are_sums),)

    @classmethod
    def of_lowering(cls, lowering: mtf.Lowering) -> PendingLowering:
        """Returns the `PendingLowering` of `lowering`, the object that lowers its pending sums.

        Raises ValueError if the plan has not begun yet to lower operations for `lowering`.
        """
        extensions = StepPlan.of(lowering.graph).lowering_state(lowering).extensions
        return next(x for x in extensions if isinstance(x, PendingLowering))

    def begin(self, lowering: mtf.Lowering) -> PendingLowering:
        graph = lowering.graph
        targets, sums = (
            [t for use in self._declared if use.are_sums is are for t in use.tensors]
            for are in (False, True)
        )

        @functools.lru_cache(maxsize=None)
        def axis_of(mesh: mtf.Mesh, dim: mtf.Dimension) -> int | None:
            return lowering.mesh_to_impl[mesh].tensor_dimension_to_mesh_axis(dim)

        @functools.lru_cache(maxsize=None)
        def replica_axes(mesh: mtf.Mesh) -> Axes:
            own = [use for use in self._declared if use.tensors[0].mesh is mesh]
            names = [use.batch_dims for use in own or self._declared]
            return batch_axes(graph, mesh, axis_of, [*targets, *sums], names)

        flow = Flow(graph, targets, Layout(axis_of, replica_axes), sums)
        return PendingLowering(lowering, flow, self._buckets(flow), flow.missing_sums(targets))

    def _buckets(self, flow: Flow) -> dict[mtf.Tensor, Bucket]:
        """Returns the tensors whose parts have to be added up over the mesh, each with its bucket.

        Tensors whose uses wrappers have declared come first, in the order in which the uses were
        declared. Tensors that only the program's own operations use are last.
        """
        found: dict[mtf.Tensor, Bucket] = {}
        for use in self._declared:
            for tensor in flow.sums_to_reduce(use.tensors, use.reduced):
                found.setdefault(tensor, Bucket(use.strategy, by_program=False))
        if self._declared:
            # Sums that only the program itself needs reduced (for a norm that it logs, for example)
            # are reduced apart from the others: the program may not need them in every step.
            own = [
                t
                for operation, tensors in flow.forced.items()
                if not isinstance(operation, GradientOperation)
                for t in tensors
            ]
            for tensor in flow.sums_to_reduce(own, True):
                found.setdefault(tensor, Bucket(self._declared[0].strategy, by_program=True))
        return found
