"""Names of gradients in errors and warnings."""

from __future__ import annotations

from mtf_gradsync._private.gradients_calls import gradients_calls
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import loop_body


def gradient_name(grad: mtf.Tensor) -> str:
    """Names a gradient by its variable, if it comes from `mtf.gradients`."""
    variable_of = {
        y: x
        for call in gradients_calls(grad.graph)
        for y, x in zip(call.outputs, call.inputs)
        if isinstance(x.operation, mtf.Variable)
    }
    tensor = grad
    while tensor not in variable_of:
        operation = tensor.operation
        if tensor not in operation.outputs or not operation.inputs:
            return f"gradient {grad.name!r}"
        position = operation.outputs.index(tensor)
        if isinstance(operation, mtf.WhileLoopOperation):
            tensor = loop_body(operation).outputs[position]
        else:
            # A list of gradients, or a gradient and what it is multiplied by.
            inputs = operation.inputs
            tensor = inputs[position if len(inputs) >= len(operation.outputs) else 0]
    return f"the gradient of variable {variable_of[tensor].operation.name!r}"
