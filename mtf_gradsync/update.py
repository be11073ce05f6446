"""When an inner optimizer's update may run: after all gradients, on variables read once.

Mesh-TensorFlow orders neither the writes of a step after its reads nor two reads of a variable
with each other (see docs/races.md). Here every variable is read once a step, where it is
lowered, and every write waits for all gradients and for all of these reads.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any, Callable, Sequence

from mtf_gradsync._tf_compat import mtf, tf

_logger = logging.getLogger(__name__)
_warned = set()


def warn_once(key: str, message: str, *args: Any) -> None:
    """Logs a warning the first time that its key is seen in this process."""
    if key not in _warned:
        _warned.add(key)
        _logger.warning(message, *args)


def reset_warnings() -> None:
    """Forgets which warnings were given, for tests."""
    _warned.clear()


class ReadOnce(mtf.Operation):
    """Replaces a lowered variable by one read of it, which all later operations share."""

    def __init__(self, variable: mtf.Variable):
        super().__init__(variable.outputs, name="read_once")
        self._variable = variable

    @property
    def variable(self) -> mtf.Variable:
        """The variable that is read."""
        return self._variable

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        value = self.inputs[0]
        # Autostack turns the variable's value into a slice of a stacked one, which is a tensor
        # already, as is every value on a SIMD mesh.
        lowered = lowering.tensors[value].to_laid_out_tensor()
        if all(isinstance(x, tf.Tensor) for x in lowered.tensor_list):
            return
        mesh_impl = lowering.mesh_impl(self)
        lowering.set_tensor_lowering(value, mesh_impl.slicewise(tf.convert_to_tensor, lowered))


def read_variables_once(graph: mtf.Graph) -> None:
    """Makes the lowering read each variable that the graph has by now once.

    The read stands right behind the variable, so that every operation uses it, those that were
    built before included.
    """
    operations = graph.operations
    done = {op.variable for op in operations if isinstance(op, ReadOnce)}
    ordered: list[mtf.Operation] = []
    for operation in list(operations):
        if isinstance(operation, mtf.Variable) and operation not in done:
            read = ReadOnce(operation)
            operations.pop()  # Mesh-TF appends new operations at the end
            ordered += [operation, read]
        else:
            ordered.append(operation)
    operations[:] = ordered


class Gate(mtf.Operation):
    """A point of a step that all gradients and all reads of variables come before.

    It has no outputs; operations are put behind it by `after`.
    """

    def __init__(self, grads: Sequence[mtf.Tensor], name: str = "gate"):
        super().__init__(list(grads), name=name)
        self._barriers: Any = weakref.WeakKeyDictionary()

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        _warn_of_ref_variables(lowering)
        mesh_impl = lowering.mesh_impl(self)
        tensors = list(self.inputs)
        tensors += [op.inputs[0] for op in self.graph.operations if isinstance(op, ReadOnce)]
        lowered = [
            lowering.tensors[t].to_laid_out_tensor().tensor_list
            for t in tensors
            if t in lowering.tensors and t.mesh is self.mesh
        ]
        devices = getattr(mesh_impl, "devices", None) or [""]
        # Gathering the tensors of each device there first keeps the edges between devices few.
        reached = []
        for number, device in enumerate(devices):
            with tf.device(device):
                here = {x[number].op for x in lowered}
                reached.append(tf.group(*sorted(here, key=lambda op: op.name)))
        with tf.device(devices[0]):
            self._barriers[lowering] = tf.group(*reached)

    def barrier(self, lowering: mtf.Lowering) -> tf.Operation:
        """The tf operation that runs when all gradients and reads are done."""
        return self._barriers[lowering]


def _warn_of_ref_variables(lowering: mtf.Lowering) -> None:
    for variable, laid_out in lowering.variables.items():
        for x in laid_out.laid_out_tensor.all_slices:
            if x.dtype != x.dtype.base_dtype:
                warn_once(
                    "ref variables",
                    "Variable %s is a TensorFlow ref variable: reads and writes of ref variables "
                    "race on a mesh, and training can go wrong silently. Call "
                    "tf.compat.v1.enable_resource_variables() at the start of the program.",
                    variable.name,
                )
                return


def after(
    operations: Sequence[mtf.Operation],
    control_inputs: Callable[[mtf.Lowering], Sequence[tf.Operation]],
) -> None:
    """Makes operations run after others when they are lowered.

    The operations stay the same objects, so that Mesh-TF's rewriting of assignments (autostack)
    still finds them.

    Args:
      operations: mtf operations that are not lowered yet.
      control_inputs: called with the lowering when an operation is lowered; gives the
        tf operations to wait for.
    """
    for operation in operations:
        lower = operation.lower

        def lower_after(lowering: mtf.Lowering, lower: Any = lower) -> None:
            with tf.control_dependencies(list(control_inputs(lowering))):
                lower(lowering)

        operation.lower = lower_after


def gated_update(
    make_update: Callable[[], Sequence[mtf.Operation]], grads: Sequence[mtf.Tensor | None]
) -> list[mtf.Operation]:
    """Builds an update that writes only after all gradients exist and all variables are read.

    Args:
      make_update: builds the update and returns its operations; they may create variables
        (slots).
      grads: the gradients to wait for; None is left out, at least one is not None.

    Returns:
      The operations that make_update returned.
    """
    present = [g for g in grads if g is not None]
    gate = Gate(present)
    graph = gate.graph
    operations = list(make_update())
    _hoist_variables(graph, gate)
    read_variables_once(graph)
    after(operations, lambda lowering: [gate.barrier(lowering)])
    return operations


def _hoist_variables(graph: mtf.Graph, gate: Gate) -> None:
    """Moves variables that were made behind the gate before it, so that it sees their reads."""
    operations = graph.operations
    position = operations.index(gate)
    behind = operations[position:]
    slots = [op for op in behind if isinstance(op, mtf.Variable)]
    rest = [op for op in behind if not isinstance(op, mtf.Variable)]
    operations[position:] = slots + rest


class AdvanceStep(mtf.Operation):
    """Adds one to a tf variable that counts steps, after the update."""

    def __init__(self, mesh: mtf.Mesh, step: Any, update: Sequence[mtf.Operation], name: str):
        super().__init__([], mesh=mesh, name=name)
        self._step = step
        self._update = list(update)

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        done = [lowering.operations[op] for op in self._update]
        with tf.control_dependencies(done):
            lowering.operations[self] = tf.assign_add(
                self._step, tf.constant(1, self._step.dtype.base_dtype)
            ).op


def advance_step(
    mesh: mtf.Mesh, step: Any, update: Sequence[mtf.Operation], name: str
) -> mtf.Operation:
    """An operation that adds one to a step counter once the update is done.

    Args:
      mesh: the mesh of the update.
      step: an mtf variable (or its value), or a tf variable, of an integer or float type.
      update: the operations of the update; the count follows all of them.
      name: name of the operation.

    Returns:
      An mtf operation that the lowering knows.
    """
    if isinstance(step, (mtf.Variable, mtf.Tensor)):
        value = step.value if isinstance(step, mtf.Variable) else step
        one = mtf.constant(value.mesh, 1, mtf.Shape([]), value.dtype)
        count = mtf.assign(step, value + one, name=name)
        done: dict[str, list[mtf.Operation]] = {"update": list(update)}
        after([count], lambda lowering: [lowering.operations[op] for op in done["update"]])
        return count
    return AdvanceStep(mesh, step, update, name)
