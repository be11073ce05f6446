"""Every variable is read once a step, where it is lowered.

Mesh-TensorFlow 0.1.21 lowers a variable to the variable object itself, so that each operation that
uses it reads it again, before or after its assignment (see docs/races.md).
"""

from __future__ import annotations

import weakref
from typing import Any

from mtf_gradsync._private.libraries import mtf, tf


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


_in_place: Any = weakref.WeakSet()


def kept_in_place(variable: mtf.Variable) -> None:
    """Leaves a variable out of `read_variables_once`: it is written in place, by a wrapper.

    TensorFlow copies a variable that is added to while a value read from it is still in use. What
    reads it has to order the read itself.
    """
    _in_place.add(variable)


def read_variables_once(graph: mtf.Graph) -> None:
    """Makes the lowering read each variable that the graph has by now once.

    The read stands right behind the variable, so that every operation uses it, those that were
    built before included.
    """
    operations = graph.operations
    done = {op.variable for op in operations if isinstance(op, ReadOnce)}
    ordered: list[mtf.Operation] = []
    for operation in list(operations):
        once = isinstance(operation, mtf.Variable) and operation not in _in_place
        if once and operation not in done:
            read = ReadOnce(operation)
            operations.pop()  # Mesh-TF appends new operations at the end
            ordered += [operation, read]
        else:
            ordered.append(operation)
    operations[:] = ordered
