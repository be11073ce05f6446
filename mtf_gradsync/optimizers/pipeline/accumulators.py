"""Accumulators: sums of gradients that are kept from step to step until an update."""

from __future__ import annotations

import dataclasses
from typing import Any, Collection, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import control_flow_v1
from mtf_gradsync.gradients.operations import (
    GradientOperation,
    map_by_mesh,
    map_present,
    on_mesh,
    reduced_values,
)
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet, Weights
from mtf_gradsync.optimizers.pipeline.weights import divided
from mtf_gradsync.optimizers.slots import SlotBook, SlotOwners
from mtf_gradsync.optimizers.state import ACCUMULATOR, named_state
from mtf_gradsync.step.plan import StepPlan
from mtf_gradsync.step.writes import Gate, WriteInPlace, write_slices


class Accumulators:
    """The accumulators of a set of gradients.

    Gradients are added to the accumulators in place, and only an update reads the accumulators, so
    that a step without an update passes over them once. The mask of the gradients says what is
    added: gradients are multiplied by their weights, and there are zeros for skipped ones.

    Attributes:
      weight_state: the variable with the total weight of the gradients in the accumulators; None
        without weights.
      weight: the total weight with this step's gradients included, a float32 scalar; None without
        weights.
    """

    def __init__(
        self,
        gradients: GradientSet,
        slots: SlotBook,
        dtype: tf.DType | None = None,
        checkpointed: bool = True,
        is_share: bool = False,
        direct: mtf.Tensor | None = None,
        *,
        owner: str,
        counter: str,
    ):
        """Finds or makes the accumulators, variables `<variable>/gradient_accumulator`.

        Args:
          gradients: gradients that are per shard, reduced, or replicas' parts of reduced gradients,
            with the mask of what is added up.
          slots: the `SlotBook` in which the accumulators are recorded.
          dtype: the dtype of accumulators; None takes the gradient's dtype, but at least float32.
          checkpointed: whether checkpoints hold the sums.
          is_share: whether each shard's gradient is a term in the gradient of a mean over all
            shards, and so 1/num_shards of the shard's own gradient (see `StateNote`).
          direct: a boolean scalar, true only if all accumulators are zero, no shard is skipped and
            an update is due: the update then takes the gradients directly, which costs less if most
            steps make an update. None if updates always take the sums.
          owner: the wrapper's name. If gradients have weights, `<owner>/weight` is the variable of
            the sum of the weights.
          counter: the name of the variable that counts how many gradients are in the accumulators.
        """
        mask = gradients.mask
        assert mask is not None
        self._mask, self._direct = mask, direct
        # With `direct`, the operation that adds takes zeros itself.
        self._given = gradients = masked(gradients, with_zeros=direct is None)
        self.weight_state: mtf.Variable | None = None
        self.weight: mtf.Tensor | None = None
        if mask.weight is not None:
            # In a checkpoint without weights each gradient in the sums has a weight of one: the
            # total is then the value of the counter.
            self.weight_state = named_state(
                gradients.mesh,
                f"{owner}/weight",
                dtype=tf.float32,
                checkpointed=checkpointed,
                start=counter,
                counter=counter,
                is_total=True,
            )
            self.weight = self.weight_state.value + mask.weight
        self._variables: list[mtf.Variable] = []
        self._grads: list[mtf.Tensor] = []
        self._written: list[mtf.Operation] = []
        self._added_unless: _AddUnless | None = None
        self._taken: Sequence[mtf.Tensor] = ()
        for grad, variable in zip(gradients.present, gradients.owners):
            wide = dtype or (grad.dtype if grad.dtype.size >= 4 else tf.float32)
            accumulator = named_state(
                variable.mesh,
                f"{variable.name}/{ACCUMULATOR}",
                grad.shape,
                wide,
                checkpointed,
                in_scope=True,
                # Also if it is 0: the checkpoint may be from a mesh with several shards.
                num_shard_dims=grad.shape.ndims - variable.shape.ndims,
                is_share=is_share,
                is_total=gradients.weights is not None,
                counter=counter,
                weight=f"{owner}/weight",
            )
            slots.record([accumulator], [variable], tf.get_variable_scope().name)
            self._variables.append(accumulator)
            self._grads.append(grad if grad.dtype == wide else mtf.cast(grad, wide))
        keepers = StepPlan.of(gradients.graph).extension(SlotOwners)
        keepers.record_keeper(slots, self._variables, gradients.variables)

    def add(self, step: StepBuilder) -> Gate | None:
        """Adds this step's gradients to the accumulators; returns a gate for the step's writes.

        The gate is an operation that holds back writes until the gradients exist. The result is
        None if a branch of the step is open, because a branch waits as a whole.
        """
        mask = self._mask
        # Sums that were reduced on this step are used only if they are added up.
        counts = mask.number if mask.weight is None else mask.weight
        always = mask.skipped is None and mask.weight is None
        step.write_state(None if always else lambda: mtf.greater(counts, 0))
        for variable in self._variables:
            step.plan.write_in_place(variable)
        if self._direct is not None:
            present = [i for i, g in enumerate(self._given.grads) if g is not None]
            reduced = [i in self._given.already_reduced for i in present]
            self._added_unless = _AddUnless(
                self._grads, reduced, self._variables, mask.skipped, self._direct
            )
            return step.gate(self._added_unless.outputs)
        gate = step.gate(self._grads)
        # Mesh-TF's assign_add_slice (0.1.21) reads, adds and assigns: two passes.
        self._written = [WriteInPlace(self._variables, self._grads, tf.assign_add, "accumulate")]
        step.write(self._written, gate)
        return gate

    def take_when(
        self,
        due: mtf.Tensor,
        step: StepBuilder,
        gate: Gate | None,
        divisor: mtf.Tensor | None = None,
        weight: mtf.Tensor | None = None,
        of_reduced: float = 1.0,
    ) -> GradientSet:
        """Returns this step's gradients with a condition: later stages run in steps with an update.

        In steps with an update, later stages get the accumulated sums, which include this step's
        gradients, in the place of the gradients. The sums are not reduced yet. If the gradients are
        replicas' parts, the sums are replicas' parts, too.

        Args:
          due: a boolean scalar, whether the step makes an update.
          step: the step that is being built.
          gate: the gate that `add` returned.
          divisor: a scalar by which the sums are divided after they are reduced; None for no
            division. The sums are then cast to the dtypes of the gradients.
          weight: the sum of the weights by which gradients were multiplied; None without weights.
            With weights the sums may be too large to send. So they are divided before they are
            reduced: by `divisor`, or by `weight` if `divisor` is None.
          of_reduced: a factor for the sums of those gradients that were reduced already when they
            were added; 1.0 leaves these sums as they are.
        """

        def take(given: GradientSet) -> GradientSet:
            unless = self._added_unless
            self._taken = unless.outputs if unless else step.value_after(self._variables, ())
            sums: GradientSet = dataclasses.replace(
                given.with_present(self._taken),
                form=Form.PART if given.form is Form.PART else Form.PENDING,
                dtypes=tuple(None if g is None else g.dtype for g in given.grads),
                unreduced=None,
                mask=None,
            )
            if weight is not None:
                by = weight if divisor is None else divisor
                means = [divided(x, by) for x in self._taken]
                return sums.with_present(means, weights=Weights(weight))
            if of_reduced != 1.0:
                sums = sums.change_reduced(lambda g: g * of_reduced)
            return dataclasses.replace(sums, divisor=divisor)

        return self._given.only_when(
            due, gate, wait_for=self._written, first=take, last=self._clear
        )

    def _clear(self) -> list[mtf.Operation]:
        """Returns the last operations of the update's branch: they zero the accumulators."""
        if self._added_unless is not None:
            return [_ClearUnless(self._added_unless)]
        return [WriteInPlace(self._variables, self._taken, _clear, "clear_accumulated")]


def _clear(variable: Any, taken: tf.Tensor) -> tf.Operation:
    with tf.control_dependencies([taken]):
        return tf.assign(variable, tf.zeros_like(taken))


def zeros_where(skip: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Returns x, or zeros of its shape if the boolean scalar `skip` is true; x may hold NaNs."""
    return tf.where_v2(skip, tf.zeros_like(x), x)


class ZerosWhere(GradientOperation):
    """An operation whose outputs are the gradients, but zeros on processors where they are skipped.

    `skip` is boolean: a scalar, or a tensor `[shard dims...]` with a value for each shard.
    """

    def __init__(self, grads: Sequence[mtf.Tensor], skip: mtf.Tensor):
        super().__init__([*grads, skip], [g.shape for g in grads], "zeros_where")

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        *grads, skip = reduced_values(lowering, self.inputs)
        skip = mesh_impl.slicewise(lambda x: tf.reshape(x, []), skip)
        self.set_outputs(lowering, [mesh_impl.slicewise(zeros_where, skip, g) for g in grads])


def without_skipped(gradients: GradientSet, skip: mtf.Tensor) -> GradientSet:
    """Returns gradients with zeros in place of skipped gradients, which may hold NaNs.

    `skip` is boolean. As a scalar it says whether all gradients are skipped. As a tensor
    `[shard dims...]` it says which shards are skipped; gradients that are reduced already then stay
    as they are.
    """
    reduced = gradients.already_reduced if skip.shape.dims else ()
    own = [None if i in reduced else g for i, g in enumerate(gradients.grads)]

    def of_mesh(mesh: mtf.Mesh, grads: list[mtf.Tensor]) -> Sequence[mtf.Tensor]:
        return ZerosWhere(grads, on_mesh(skip, mesh)).outputs

    kept = map_present(own, lambda present: map_by_mesh(present, of_mesh))
    return gradients.with_grads([k or g for k, g in zip(kept, gradients.grads)])


def masked(gradients: GradientSet, with_zeros: bool = True) -> GradientSet:
    """Returns gradients as their mask says: times their weights, zeros in place of skipped ones.

    Without `with_zeros`, skipped gradients stay as they are. If the mask is one of shards,
    gradients that are reduced already stay as they are, too.
    """
    mask, weights = gradients.mask, gradients.weights
    assert mask is not None
    reduced: Collection[int] = ()
    if mask.skipped is not None:
        reduced = gradients.already_reduced if mask.skipped.shape.dims else ()
        gradients = without_skipped(gradients, mask.skipped) if with_zeros else gradients
    if weights is None:
        return gradients
    return gradients.with_grads(
        [
            g if g is None or i in reduced else multiply_by_count(on_mesh(weights.total, g.mesh), g)
            for i, g in enumerate(gradients.grads)
        ]
    )


def multiply_by_count(contributions: mtf.Tensor, grad: mtf.Tensor) -> mtf.Tensor:
    """Multiplies a gradient by a count or weight; a count of 0 gives zeros, even for NaNs.

    `contributions` is the count or weight: a scalar, or a tensor with some dimensions of `grad`.
    The result has the gradient's dtype, but at least float32.
    """
    wide = grad.dtype if grad.dtype.size >= 4 else tf.float32

    def multiply(x: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        return zeros_where(tf.equal(count, 0), tf.cast(x, wide) * tf.cast(count, wide))

    return mtf.cwise(multiply, [grad, contributions], wide)


class _AddUnless(GradientOperation):
    """An operation that adds gradients to the accumulators, unless the update takes them directly.

    The outputs are the gradients if `direct` is true, and else the new sums. `are_reduced`
    says for each gradient whether it is reduced already.
    """

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        are_reduced: Sequence[bool],
        accumulators: Sequence[mtf.Variable],
        skipped: mtf.Tensor,
        direct: mtf.Tensor,
    ):
        self._are_reduced = are_reduced
        self.variables = list(accumulators)
        shapes = [x.shape for x in accumulators]
        super().__init__([*grads, skipped, direct], shapes, "accumulate_unless")

    def lower(self, lowering: mtf.Lowering) -> None:
        def add(own: list[int], slices: list[Any], values: list[Any]) -> list[tf.Tensor]:
            *grads, skipped, direct = values

            def as_they_are() -> list[tf.Tensor]:
                return [tf.identity(grads[i]) for i in own]

            def added() -> list[tf.Tensor]:
                skip, sums = tf.reshape(skipped, []), []
                for i, variable in zip(own, slices):
                    grad = grads[i] if self._are_reduced[i] else zeros_where(skip, grads[i])
                    with tf.control_dependencies([tf.assign_add(variable, grad)]):
                        sums.append(tf.convert_to_tensor(variable))
                return sums

            with control_flow_v1():
                return tf.cond(tf.reshape(direct, []), as_they_are, added, strict=True)

        values = [x.all_slices for x in reduced_values(lowering, self.inputs)]
        self.set_outputs(lowering, write_slices(lowering, self.variables, add, values))


class _ClearUnless(mtf.Operation):
    """An operation that zeroes the accumulators, unless the update has taken gradients directly."""

    def __init__(self, added: _AddUnless):
        super().__init__([added.inputs[-1]], name="clear_accumulated_unless")
        self._accumulators = added.variables

    def lower(self, lowering: mtf.Lowering) -> None:
        def clear(own: list[int], slices: list[Any], values: list[Any]) -> list[tf.Tensor]:
            def cleared() -> tf.Tensor:
                with tf.control_dependencies(
                    [tf.assign(x, tf.zeros(x.shape, x.dtype)) for x in slices]
                ):
                    return tf.constant(0)

            with control_flow_v1():
                is_done = tf.cond(tf.reshape(values[0], []), lambda: tf.constant(0), cleared)
            return [is_done] * len(own)

        (direct,) = reduced_values(lowering, self.inputs)
        done = write_slices(lowering, self._accumulators, clear, [direct.all_slices])
        lowering.operations[self] = tf.group(*(x for one in done for x in one.all_slices))
