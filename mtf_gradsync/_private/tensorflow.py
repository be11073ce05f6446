"""What this package uses of TensorFlow that has no public name, one function each.

Every function names the versions that it was read on; ``tests/private/test_tensorflow.py`` has a
test of each that fails where a version means something else.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

from mtf_gradsync._private.libraries import tf


class TracedFunction(NamedTuple):
    """The operations that a Python function of TensorFlow tensors makes.

    Attributes:
      operations: all of them, in the order in which they were made; placeholders included.
      inputs: the placeholder of each argument.
      captures: pairs of a tensor of the graph outside that the function uses, and the placeholder
        that stands for it.
      outputs: what the function returned, flattened; each may be a placeholder.
    """

    operations: list[tf.Operation]
    inputs: list[tf.Tensor]
    captures: list[tuple[Any, tf.Tensor]]
    outputs: list[tf.Tensor]


def trace_function(tf_fn: Callable[..., Any], input_specs: Sequence[Any]) -> TracedFunction:
    """Runs a function in a graph of its own and returns what it made there.

    Nothing is added to the current graph, whether or not the function uses tensors of it. Variables
    that the function makes would still be listed in the current graph's collections.

    ``FuncGraph`` read on TensorFlow 2.12 to 2.21.

    Args:
      tf_fn: takes one tensor for each spec and returns a tensor, or a nest of tensors.
      input_specs: objects with ``shape`` and ``dtype``, such as ``tf.TensorSpec`` or tensors.

    Returns:
      A `TracedFunction`. Its conditionals and loops are of control flow v2, as in any function.
    """
    from tensorflow.python.framework import func_graph

    graph = func_graph.FuncGraph("trace")
    with graph.as_default():
        inputs = [tf.placeholder(spec.dtype, spec.shape) for spec in input_specs]
        # capture returns a tensor of its own graph as it is.
        outputs = [graph.capture(tf.convert_to_tensor(x)) for x in tf.nest.flatten(tf_fn(*inputs))]
    return TracedFunction(graph.get_operations(), inputs, list(graph.captures), outputs)
