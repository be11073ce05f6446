"""Updates behind a gate, and the count of steps."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from mtf_gradsync._common import warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._variables import CURE, ref_variables_explained
from mtf_gradsync.step.later import built
from mtf_gradsync.step.plan import Plan


class Gate:
    """A point of a step, after some tensors and the reads of all variables of their meshes."""

    def __init__(self, plan: Plan, tensors: Sequence[mtf.Tensor]):
        self._plan = plan
        self._tensors = list(tensors)

    def hold(self, operations: Sequence[mtf.Operation]) -> None:
        """Makes operations wait for the gate."""
        self._plan.wait(operations, lambda lowering: [self.barrier(lowering)])

    def barrier(self, lowering: mtf.Lowering) -> tf.Operation:
        """Returns the tf operation that follows the gate's tensors; for calls outside branches."""
        barriers = self._plan.lowered(lowering).barriers
        if self not in barriers:
            barriers[self] = self._make(lowering)
        return barriers[self]

    def _make(self, lowering: mtf.Lowering) -> tf.Operation:
        _warn_of_ref_variables(lowering)
        lowered = self._plan.lowered(lowering)
        meshes = dict.fromkeys(t.mesh for t in self._tensors)
        tensors = [*self._tensors, *(t for m in meshes for t in lowered.reads.get(m, ()))]
        laid_out = [lowering.tensors[t].to_laid_out_tensor() for t in tensors]
        slices = [x for one in laid_out for x in one.tensor_list]
        # One operation on each device first, so that there are few edges between devices.
        by_device: dict[str, list[tf.Operation]] = {}
        for op in dict.fromkeys(x.op for x in slices):
            by_device.setdefault(op.device, []).append(op)
        with lowered.name_scope("gate"):
            reached = []
            for device, ops in by_device.items():
                with tf.device(device):
                    reached.append(tf.group(*ops))
            with tf.device(next(iter(by_device), "")):
                return tf.group(*reached)


def _warn_of_ref_variables(lowering: mtf.Lowering) -> None:
    for variable, laid_out in lowering.variables.items():
        for x in laid_out.laid_out_tensor.all_slices:
            if x.dtype != x.dtype.base_dtype:
                warn_once(
                    "ref variables",
                    "Variable %s is a TensorFlow ref variable: reads and writes of ref variables "
                    "race on a mesh, and training can go wrong silently. %s",
                    variable.name,
                    CURE,
                )
                return


def gated_update(
    make_update: Callable[[], Sequence[mtf.Operation]], grads: Sequence[Any]
) -> list[mtf.Operation]:
    """Builds an update that writes only after all gradients exist and all variables are read.

    Inside another update or a branch, it waits with that. At least one gradient is not None; the
    update may create variables (slots).
    """
    present = [g for g in grads if g is not None]
    plan = Plan.of(present[0].graph)
    if plan.is_held:
        return list(make_update())
    with plan.gating():
        operations = list(make_update())
    Gate(plan, present).hold(operations)
    return operations


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
