"""An update writes only after all gradients exist and all variables are read."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Iterator, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._warn import warn_once
from mtf_gradsync.step.reads import ReadOnce, read_variables_once


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
        tensors = list(self.inputs)
        tensors += [op.inputs[0] for op in self.graph.operations if isinstance(op, ReadOnce)]
        lowered = [
            lowering.tensors[t].to_laid_out_tensor().tensor_list
            for t in tensors
            if t in lowering.tensors and t.mesh is self.mesh
        ]
        # Gathering the operations of each device there first keeps the edges between devices few.
        by_device: dict[str, list[tf.Operation]] = {}
        for op in dict.fromkeys(x.op for slices in lowered for x in slices):
            by_device.setdefault(op.device, []).append(op)
        reached = []
        for device, ops in by_device.items():
            with tf.device(device):
                reached.append(tf.group(*ops))
        with tf.device(next(iter(by_device), "")):
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


_in_branch: Any = weakref.WeakSet()


@contextlib.contextmanager
def ungated(graph: mtf.Graph) -> Iterator[None]:
    """Within it, updates of a graph are not gated: what surrounds them is."""
    outermost = graph not in _in_branch
    _in_branch.add(graph)
    try:
        yield
    finally:
        if outermost:
            _in_branch.discard(graph)


def is_ungated(graph: mtf.Graph) -> bool:
    """Whether a graph is within `ungated`, as in a branch that holds an update."""
    return graph in _in_branch


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
    graph = present[0].graph
    if graph in _in_branch:
        return list(make_update())
    gate = Gate(present)
    operations = list(make_update())
    settle(gate)
    after(operations, lambda lowering: [gate.barrier(lowering)])
    return operations


def settle(gate: Gate) -> None:
    """Brings all variables that were made behind a gate before it, and reads each once."""
    _hoist_variables(gate.graph, gate)
    read_variables_once(gate.graph)


def _hoist_variables(graph: mtf.Graph, gate: Gate) -> None:
    """Moves variables that were made behind the gate before it, so that it sees their reads."""
    operations = graph.operations
    position = operations.index(gate)
    behind = operations[position:]
    slots = [op for op in behind if isinstance(op, mtf.Variable)]
    rest = [op for op in behind if not isinstance(op, mtf.Variable)]
    operations[position:] = slots + rest
