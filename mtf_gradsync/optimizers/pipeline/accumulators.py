"""Sums of gradients that are kept from step to step, until an update takes them."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients import StageOperation
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.state.leave_out import zeros_where
from mtf_gradsync.optimizers.state.restoring import note_state
from mtf_gradsync.optimizers.state.slots import SlotBook
from mtf_gradsync.optimizers.state.variables import ACCUMULATOR, state_variable
from mtf_gradsync.step import Gate, Plan


class Accumulated(NamedTuple):
    """A gradient of this step, and the accumulator that it is added to.

    Attributes:
      index: position of the gradient's variable.
      accumulator: a mesh variable of the gradient's shape.
      grad: the gradient, in the accumulator's dtype.
      dtype: the gradient's own dtype.
    """

    index: int  # type: ignore[assignment]  # in place of the method of tuples, which none calls
    accumulator: mtf.Variable
    grad: mtf.Tensor
    dtype: tf.DType


class Bypass(NamedTuple):
    """When an update takes this step's gradients as they are, without accumulators.

    Attributes:
      holds: a boolean mtf scalar, true only where all accumulators are zero, nothing is left out
        and an update is due.
      left_out: boolean `[shard dims...]`, whose gradients are zeros where it does not hold.
    """

    holds: mtf.Tensor
    left_out: mtf.Tensor


class Accumulators:
    """The accumulators of a list of gradients.

    They are written in place and read only where an update takes them, so that a step without an
    update costs one pass over them.
    """

    def __init__(
        self,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
        slots: SlotBook,
        dtype: tf.DType | None = None,
        checkpointed: bool = True,
        is_share: bool = False,
        counter: str | None = None,
    ):
        """Finds or makes the accumulators, `<variable>/gradient_accumulator`.

        Args:
          grads: gradients, per shard or whole; None has no accumulator.
          variables: their variables.
          slots: where new accumulators are recorded.
          dtype: dtype to add up in; None takes the gradient's, but at least float32.
          checkpointed: whether checkpoints hold the sums.
          is_share: whether what a shard adds is 1/num_shards of its own gradient (`StateNote`).
          counter: name of the variable that counts what is added.
        """
        self._variables = list(variables)
        self._of: list[Accumulated] = []
        self._add: _Add | None = None
        self._added_unless: _AddUnless | None = None
        self._taken: _Take | None = None
        before = set(variables[0].graph.all_variables)
        for index, (grad, variable) in enumerate(zip(grads, variables)):
            if grad is None:
                continue
            wide = dtype or (grad.dtype if grad.dtype.size >= 4 else tf.float32)
            name = f"{variable.name}/{ACCUMULATOR}"
            accumulator = state_variable(
                variable.mesh, name, grad.shape, wide, checkpointed, stacked=False
            )
            if accumulator not in before:
                Plan.of(accumulator.graph).write_in_place(accumulator)
                slots.record([accumulator], [variable], tf.get_variable_scope().name)
                if checkpointed:
                    # Without shard dims too: the checkpoint may come from a mesh with shards.
                    num_shard_dims = grad.shape.ndims - variable.shape.ndims
                    note_state(
                        accumulator,
                        num_shard_dims=num_shard_dims,
                        is_share=is_share,
                        counter=counter,
                    )
            cast = grad if grad.dtype == wide else mtf.cast(grad, wide)
            self._of.append(Accumulated(index, accumulator, cast, grad.dtype))

    @property
    def dtypes(self) -> list[tf.DType | None]:
        """The dtypes of the gradients, None for None."""
        dtypes: list[tf.DType | None] = [None] * len(self._variables)
        for one in self._of:
            dtypes[one.index] = one.dtype
        return dtypes

    def add(self, step: StepBuilder, bypass: Bypass | None = None) -> Gate | None:
        """Adds this step's gradients to the accumulators.

        Args:
          step: the step that is being built.
          bypass: when accumulators are passed by; for updates that are due on most steps.

        Returns:
          The gate that all writes of the step are to wait for.
        """
        step.write_state()
        if bypass is not None:
            self._added_unless = _AddUnless(self._of, bypass)
            return step.gate(self._added_unless.outputs)
        gate = step.gate([one.grad for one in self._of])
        self._add = _Add(self._of)
        step.write([self._add], gate)
        return gate

    def take_when(
        self, due: mtf.Tensor, step: StepBuilder, gate: Gate | None, counts_every_step: bool
    ) -> list[mtf.Tensor | None]:
        """Opens the branch of a step that has an update, and takes the sums there.

        Args:
          due: a boolean mtf scalar, the same on all processors.
          step: the step that is being built.
          gate: what `add` returned.
          counts_every_step: as for `StepBuilder.only_when`.

        Returns:
          The sums, this step's gradients included, None where a gradient is None.
        """
        behind = [self._add] if self._add else []
        is_call = self._added_unless is None
        step.only_when(due, gate, behind, is_call, counts_every_step, self._clear)
        if self._added_unless is not None:
            return self._by_variable(self._added_unless.outputs)
        self._taken = _Take(self._of)
        return self._by_variable(self._taken.outputs)

    def _clear(self) -> list[mtf.Operation]:
        """Makes the accumulators zero where the sums were taken, update or not."""
        if self._added_unless is not None:
            return [_ClearUnless(self._added_unless)]
        return [_Clear(self._taken)] if self._taken is not None else []

    def _by_variable(self, values: Sequence[mtf.Tensor]) -> list[mtf.Tensor | None]:
        """Values of the accumulators in the order of the variables, None where there is none."""
        result: list[mtf.Tensor | None] = [None] * len(self._variables)
        for one, value in zip(self._of, values):
            result[one.index] = value
        return result


class _AddUnless(StageOperation):
    """Gradients as they are, or what accumulators hold once gradients were added."""

    def __init__(self, accumulated: Sequence[Accumulated], bypass: Bypass):
        grads = [one.grad for one in accumulated]
        self.accumulators = [one.accumulator for one in accumulated]
        shapes = [x.shape for x in self.accumulators]
        super().__init__([*grads, bypass.left_out, bypass.holds], shapes, "accumulate_unless")

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        count = len(self.accumulators)

        def add(*tensors: Any) -> tuple[tf.Tensor, ...]:
            grads, left_out, bypass = tensors[:count], tensors[count], tensors[count + 1]

            def as_they_are() -> list[tf.Tensor]:
                return [tf.identity(grad) for grad in grads]

            def added() -> list[tf.Tensor]:
                skip, sums = tf.reshape(left_out, []), []
                for grad, variable in zip(grads, tensors[count + 2 :]):
                    add = tf.assign_add(variable, zeros_where(skip, grad))
                    with tf.control_dependencies([add]):
                        sums.append(tf.convert_to_tensor(variable))
                return sums

            return tuple(tf.cond(tf.reshape(bypass, []), as_they_are, added, strict=True))

        mesh_impl = lowering.mesh_impl(self)
        tensors = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs]
        slices = [lowering.variables[v].laid_out_tensor for v in self.accumulators]
        self.set_outputs(lowering, list(mesh_impl.slicewise(add, *tensors, *slices)))


class _ClearUnless(mtf.Operation):
    """Zeros in accumulators, except where they were passed by; runs behind the gate."""

    def __init__(self, added: _AddUnless):
        super().__init__([added.inputs[-1]], name="clear_accumulated_unless")
        self._accumulators = added.accumulators

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""

        def clear(bypass: tf.Tensor, *variables: Any) -> tf.Tensor:
            def cleared() -> tf.Tensor:
                writes = [tf.assign(x, tf.zeros(x.shape, x.dtype)) for x in variables]
                with tf.control_dependencies(writes):
                    return tf.constant(0)

            return tf.cond(tf.reshape(bypass, []), lambda: tf.constant(0), cleared)

        bypass = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
        slices = [lowering.variables[v].laid_out_tensor for v in self._accumulators]
        done = lowering.mesh_impl(self).slicewise(clear, bypass, *slices)
        lowering.operations[self] = tf.group(*done.all_slices)


class _Take(StageOperation):
    """What accumulators hold."""

    def __init__(self, accumulated: Sequence[Accumulated]):
        self.accumulators = [one.accumulator for one in accumulated]
        values = [accumulator.value for accumulator in self.accumulators]
        super().__init__(values, [x.shape for x in values], "take_accumulated")

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        slices = [lowering.variables[v].laid_out_tensor for v in self.accumulators]
        read = [mesh_impl.slicewise(tf.convert_to_tensor, x) for x in slices]
        self.set_outputs(lowering, read)


class _Clear(mtf.Operation):
    """Zeros in accumulators, once they were taken."""

    def __init__(self, taken: _Take):
        super().__init__(taken.outputs, name="clear_accumulated")
        self._accumulators = taken.accumulators

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""

        def clear(variable: Any, slice_variable: Any, taken: tf.Tensor) -> tf.Operation:
            with tf.control_dependencies([taken]):
                return tf.assign(slice_variable, tf.zeros_like(taken))

        _write(self, lowering, self._accumulators, clear)


class _Add(mtf.Operation):
    """Adds gradients to accumulators, in place."""

    def __init__(self, accumulated: Sequence[Accumulated]):
        super().__init__([one.grad for one in accumulated], name="accumulate")
        self._accumulators = [one.accumulator for one in accumulated]

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""

        def add(variable: Any, slice_variable: Any, grad: tf.Tensor) -> tf.Operation:
            # Mesh-TF's assign_add_slice (0.1.21) reads, adds and assigns: two passes.
            return tf.assign_add(slice_variable, grad)

        _write(self, lowering, self._accumulators, add)


def _write(
    operation: mtf.Operation,
    lowering: mtf.Lowering,
    variables: Sequence[mtf.Variable],
    assign_fn: Callable[[Any, Any, tf.Tensor], Any],
) -> None:
    writes = [
        lowering.variables[variable].assign_to_slices(
            assign_fn, lowering.tensors[value].to_laid_out_tensor().all_slices
        )
        for variable, value in zip(variables, operation.inputs)
    ]
    lowering.operations[operation] = tf.group(*writes)
