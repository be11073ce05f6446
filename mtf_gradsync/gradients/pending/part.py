"""The plan's part for pending sums: what wrappers want of gradients, and when sums are made."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import (
    loop_body,
    loop_condition,
    scalar_added,
)
from mtf_gradsync.gradients.partial_sums import PartialSum, reduce_partial_sums, share
from mtf_gradsync.gradients.pending.flow import Axes, Flow, Layout, Use
from mtf_gradsync.gradients.pending.sums import PendingSum, current_context
from mtf_gradsync.gradients.stage import StageOperation
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step import Part, PartLowering, Plan
from mtf_gradsync.step.hook import flat


class _Want(NamedTuple):
    """Gradients that somebody wants.

    Attributes:
      tensors: the gradients.
      whole: whether they are wanted summed, or as each processor's part.
      batch_dims: names of the dimensions of the batch.
      strategy: how sums cross the mesh.
      are_sums: whether they are sums themselves, over whatever axes of the mesh.
    """

    tensors: tuple[mtf.Tensor, ...]
    whole: bool
    batch_dims: tuple[str, ...]
    strategy: Strategy
    are_sums: bool


class PendingSums(Part):
    """Lets sums stay pending, and makes those behind all wanted gradients together."""

    def __init__(self) -> None:
        self._wants: tuple[_Want, ...] = ()

    @classmethod
    def want(
        cls,
        tensors: Sequence[mtf.Tensor],
        whole: bool,
        batch_dims: Sequence[str],
        strategy: Strategy,
        are_sums: bool = False,
    ) -> None:
        """Says that gradients are going to be used.

        The sums behind all gradients that are wanted whole cross the mesh together, by the
        strategy, at the first place that needs one of them, which may be in the model.

        Args:
          tensors: gradients of one graph, at least one.
          whole: whether they are wanted summed, or as each processor's part.
          batch_dims: names of the dimensions that the batch is split along.
          strategy: how sums cross the mesh.
          are_sums: whether they are sums themselves, over whatever axes of the mesh: then they
            cross together where each shard holds its own part of them, too.
        """
        plan = Plan.of(tensors[0].graph)
        plan.adopt()
        part = plan.part(cls)
        part._wants += (_Want(tuple(tensors), whole, tuple(batch_dims), strategy, are_sums),)

    def begin(self, lowering: mtf.Lowering) -> _Lowering:
        """See `Part.begin`."""
        names = {name for want in self._wants for name in want.batch_dims}

        def axis_of(mesh: mtf.Mesh, dim: mtf.Dimension) -> int | None:
            return lowering.mesh_to_impl[mesh].tensor_dimension_to_mesh_axis(dim)

        def replica_axes(mesh: mtf.Mesh) -> Axes:
            axes = {axis_of(mesh, mtf.Dimension(name, 1)) for name in names}
            return Axes(axes - {None})

        targets, sums = (
            [t for want in self._wants if want.are_sums is are for t in want.tensors]
            for are in (False, True)
        )
        flow = Flow(lowering.graph, targets, Layout(axis_of, replica_axes), sums)
        together: dict[mtf.Tensor, Strategy] = {}
        for want in self._wants:
            for tensor in flow.sums_behind(want.tensors, want.whole):
                together.setdefault(tensor, want.strategy)
        return _Lowering(lowering, flow, together)


class _Lowering(PartLowering):
    """Pending sums while one lowering runs."""

    def __init__(self, lowering: mtf.Lowering, flow: Flow, together: dict[mtf.Tensor, Strategy]):
        self._lowering = lowering
        self._flow = flow
        self._together = together

    def lower(self, operation: mtf.Operation) -> bool:
        """See `PartLowering.lower`."""
        if isinstance(operation, StageOperation):
            return False  # it knows of pending sums itself
        if isinstance(operation, mtf.WhileLoopOperation):
            self._make_captured_whole(operation)
        use = self._flow.uses.get(operation)
        pending = self._pending_inputs(operation)
        if use is not None and pending:
            self._carry_on(operation, use)
            return True
        # Mesh-TF has these whole; and tf.gradients cannot take a pending sum.
        takes_none = isinstance(operation, mtf.GenericGradOperation)
        wholes = {
            t: self._tensors[t].to_laid_out_tensor()
            for t in pending
            if takes_none or self._flow.is_derived(t)
        }
        if not wholes and operation not in self._flow.operations:
            return False
        with self._in_place_of_inputs(wholes):
            operation.lower_itself(self._lowering)
        self._keep_pending(operation)
        return True

    @contextlib.contextmanager
    def inside_branch(self) -> Iterator[None]:
        """See `PartLowering.inside_branch`.

        What is made of a sum in a branch, parts or the whole, has no value for readers outside, or
        in the other branch.
        """
        before = {
            tensor: lowered
            for tensor, lowered in self._tensors.items()
            if isinstance(lowered, PendingSum) and not lowered.is_complete
        }
        self._tensors.update((tensor, lowered.copied()) for tensor, lowered in before.items())
        try:
            yield
        finally:
            self._tensors.update(before)

    @property
    def _tensors(self) -> dict[mtf.Tensor, Any]:
        return self._lowering.tensors

    def _pending_inputs(self, operation: mtf.Operation) -> list[mtf.Tensor]:
        return [
            t
            for t in dict.fromkeys(operation.inputs)
            if isinstance(self._tensors.get(t), mtf.LazyAllreduceSum)
        ]

    def _make_captured_whole(self, loop: mtf.WhileLoopOperation) -> None:
        """What a loop uses from outside, and somebody may use outside too, is made outside."""
        inner = list(flat([*loop_condition(loop).operations, *loop_body(loop).operations]))
        for tensor in dict.fromkeys(t for op in inner for t in op.inputs):
            lowered = self._tensors.get(tensor)
            if isinstance(lowered, PendingSum):
                lowered.to_laid_out_tensor()

    # Sums that Mesh-TF leaves pending.

    def _keep_pending(self, operation: mtf.Operation) -> None:
        for tensor in operation.outputs:
            lazy = self._tensors.get(tensor)
            if isinstance(lazy, mtf.LazyAllreduceSum) and not isinstance(lazy, PendingSum):
                parts = lazy.laid_out_input.to_laid_out_tensor()
                self._tensors[tensor] = PendingSum(
                    lazy.mesh_impl,
                    lazy.mesh_axes,
                    parts.slice_shape,
                    functools.partial(_itself, parts),
                    self._sum_for(tensor),
                    lazy.add_counter_fn,
                )

    def _sum_for(self, tensor: mtf.Tensor) -> Callable[[PendingSum], None]:
        """What makes a sum whole: alone, or with all that are wanted together."""

        def make(one: PendingSum) -> None:
            strategy = self._together.get(tensor)
            if strategy is None:
                one.set_whole(one.mesh_impl.allreduce(one.laid_out_input, one.mesh_axes, "SUM"))
                _count(one)
                return
            sums = self._ready_with(one, strategy)
            parts = [PartialSum(x.laid_out_input, tuple(sorted(x.mesh_axes))) for x in sums]
            for x, value in zip(sums, reduce_partial_sums(one.mesh_impl, parts, strategy)):
                x.set_whole(value)
                _count(x)

        return make

    def _ready_with(self, one: PendingSum, strategy: Strategy) -> list[PendingSum]:
        """All sums that can be made now by the same strategy, in the same branch or loop."""
        found = {}
        for tensor, other in self._together.items():
            lowered = self._tensors.get(tensor)
            if (
                other is strategy
                and isinstance(lowered, PendingSum)
                and not lowered.is_whole
                and lowered.context == one.context
                and lowered.mesh_impl is one.mesh_impl
            ):
                found[id(lowered)] = lowered
        found.setdefault(id(one), one)
        return list(found.values())

    # Sums that stay pending through an operation.

    def _carry_on(self, operation: mtf.Operation, use: Use) -> None:
        lowering = self._lowering
        mesh_impl = lowering.mesh_impl(operation)
        home = current_context()
        kept: dict[tuple[str, Any], list[Any]] = {}

        def once(form: str, make: Callable[[], list[Any]]) -> list[Any]:
            """Results for all outputs, which other branches have no use of."""
            here = current_context()
            if (form, home) in kept:
                return kept[form, home]
            if (form, here) not in kept:
                kept[form, here] = make()
            return kept[form, here]

        def parts(number: int) -> Any:
            value = once("parts", lambda: self._parts(operation, use))[number]
            pending = isinstance(value, mtf.LazyAllreduceSum)
            return value.laid_out_input.to_laid_out_tensor() if pending else value

        def wholes(number: int) -> Any:
            value = once("wholes", lambda: self._lowered(operation, self._wholes(operation)))
            return value[number].to_laid_out_tensor()

        sources = [] if use.is_new_sum else [self._tensors[t] for t in operation.inputs]
        for number, tensor in enumerate(operation.outputs):
            whole = self._sum_for(tensor) if use.is_new_sum else lambda _, n=number: wholes(n)
            self._tensors[tensor] = PendingSum(
                mesh_impl,
                sorted(use.axes | use.own_axes),
                mesh_impl.slice_shape(tensor.shape),
                functools.partial(parts, number),
                whole,
                sources=sources,
            )

    def _wholes(self, operation: mtf.Operation) -> dict[mtf.Tensor, Any]:
        return {t: self._tensors[t].to_laid_out_tensor() for t in operation.inputs}

    def _parts(self, operation: mtf.Operation, use: Use) -> list[Any]:
        """What an operation makes of each processor's part."""
        inputs = self._parts_of_inputs(operation, use)
        if not isinstance(operation, mtf.ScalarAddOperation):
            return self._lowered(operation, inputs)
        mesh_impl = self._lowering.mesh_impl(operation)
        count = mtf.Shape([mesh_impl.shape.dims[axis] for axis in use.axes]).size
        scalar = scalar_added(operation)

        def add(x: tf.Tensor) -> tf.Tensor:
            return x + tf.cast(scalar, x.dtype) / tf.cast(count, x.dtype)

        return [mesh_impl.slicewise(add, inputs[operation.inputs[0]])]

    def _parts_of_inputs(self, operation: mtf.Operation, use: Use) -> dict[mtf.Tensor, Any]:
        """Each processor's share of what the operation is linear in, and the factors whole."""
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
                first = sorted(axes & use.first)
                if first:
                    value = mesh_impl.allreduce(value.to_laid_out_tensor(), first, "SUM")
            found[tensor] = share(mesh_impl, value, use.axes - axes)
        return found

    def _lowered(self, operation: mtf.Operation, inputs: dict[mtf.Tensor, Any]) -> list[Any]:
        """What an operation makes of other inputs than its own."""
        outputs = operation.outputs
        before = {t: self._tensors.get(t) for t in outputs}
        lowered = Plan.of(operation.graph).lowered(self._lowering)
        with self._in_place_of_inputs(inputs), lowered.name_scope(operation.name):
            operation.lower_itself(self._lowering)
        values = [self._tensors[t] for t in outputs]
        for tensor, old in before.items():
            self._tensors[tensor] = old
        return values

    @contextlib.contextmanager
    def _in_place_of_inputs(self, values: dict[mtf.Tensor, Any]) -> Iterator[None]:
        before = {t: self._tensors[t] for t in values}
        self._tensors.update(values)
        try:
            yield
        finally:
            self._tensors.update(before)


def _itself(value: Any) -> Any:
    return value


def _count(one: PendingSum) -> None:
    if one.add_counter_fn:
        one.add_counter_fn()
