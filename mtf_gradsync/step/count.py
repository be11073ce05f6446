"""Advances step counters after an update."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._refs import ref_variables_explained
from mtf_gradsync.step.later import built
from mtf_gradsync.step.plan import Plan


class AdvanceStep(mtf.Operation):
    """Adds to a step counter that is a tf variable, after the update."""

    def __init__(
        self,
        mesh: mtf.Mesh,
        step: Any,
        update: Sequence[mtf.Operation],
        name: str,
        amount: mtf.Tensor | None = None,
    ):
        super().__init__([] if amount is None else [amount], mesh=mesh, name=name)
        self._step = step
        self._update = list(update)

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        done = [lowering.operations[op] for op in self._update]
        dtype = self._step.dtype.base_dtype
        with tf.control_dependencies(done):
            one = tf.constant(1, dtype)
            if self.inputs:
                amount = lowering.tensors[self.inputs[0]].to_laid_out_tensor().all_slices[0]
                one = tf.cast(amount, dtype)
            with ref_variables_explained():
                lowering.operations[self] = tf.assign_add(self._step, one).op


def advance_step(
    mesh: mtf.Mesh,
    step: Any,
    update: Sequence[mtf.Operation],
    name: str,
    amount: mtf.Tensor | None = None,
) -> mtf.Operation:
    """Makes an operation that adds one, or an amount, to a step counter after an update.

    The counter is an mtf variable (or its value), or a tf variable, of an integer or float type;
    the amount is the same on every processor.
    """
    if isinstance(step, (mtf.Variable, mtf.Tensor)):
        value = step.value if isinstance(step, mtf.Variable) else step
        one = mtf.constant(value.mesh, 1, mtf.Shape([]), value.dtype)
        if amount is not None:
            one = mtf.cast(amount, value.dtype)
        count = mtf.assign(step, value + one, name=name)
        before = list(update)
        Plan.of(value.graph).wait(
            [count], lambda lowering: [lowering.operations[op] for op in before]
        )
        return count
    return AdvanceStep(mesh, step, update, name, amount)


def is_advanced(update: Sequence[mtf.Operation]) -> bool:
    """Whether one of some operations advances a tf step counter, made by `advance_step`."""
    return any(isinstance(op, AdvanceStep) for op in built(update))
