"""Graphs of TensorFlow: control flow, functions, attributes, and sums of many tensors."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, NamedTuple, Sequence

from tensorflow.python.training import training_util

from mtf_gradsync._common import walk
from mtf_gradsync._private.libraries import tf


def set_attr(operation: tf.Operation, name: str, value: tf.AttrValue) -> None:
    """Sets an attribute, which TensorFlow does not check, of an operation that has not run yet."""
    operation._set_attr(name, value)


def advance_step_after_reads(graph: tf.Graph) -> None:
    """Makes the increments of a graph's global step wait for those that read it in the same step.

    Otherwise a hook, or a line that is printed, has now the step before and now the step after.
    Called again, it orders what has come since.
    """
    step = tf.train.get_global_step(graph)
    if step is None or not hasattr(step, "handle"):  # a ref variable's reads have no operation
        return
    of_hooks = training_util._get_or_create_global_step_read(graph).op
    reads = [op for op in step.handle.consumers() if op.type == "ReadVariableOp"]
    advance_step_after(step, [*reads, of_hooks])


# The attribute of a global step for the operations that its increments wait for.
_WAITED_FOR = "_mtf_gradsync_waited_for"


def advance_step_after(step: Any, reads: Sequence[tf.Operation]) -> None:
    """Makes the increments of a global step wait for operations, those that come later, too.

    What reads the step after it was advanced, by its own order, does so still. Increments in loops,
    branches and functions do not wait: to the graph these have a handle of their own.
    """
    for increment in step.handle.consumers():
        is_increment = increment.type in ("AssignAddVariableOp", "AssignSubVariableOp")
        for read in reads if is_increment else ():
            if read not in increment.control_inputs:
                before = walk([read], lambda op: [*(x.op for x in op.inputs), *op.control_inputs])
                if increment not in before:
                    increment._add_control_input(read)
    if not hasattr(step, _WAITED_FOR):
        setattr(step, _WAITED_FOR, [])
        add = step.assign_add

        def assign_add(*args: Any, **kwargs: Any) -> Any:
            is_here = tf.get_default_graph() is step.graph
            with tf.control_dependencies(getattr(step, _WAITED_FOR) if is_here else []):
                return add(*args, **kwargs)

        step.assign_add = assign_add
    getattr(step, _WAITED_FOR).extend(reads)


def control_flow_context(graph: tf.Graph) -> Any:
    """Returns the branch or loop of control flow v1 that is being built, None outside of any."""
    return graph._get_control_flow_context()


def in_loop_or_branch(graph: tf.Graph) -> bool:
    """Returns whether operations that are made now belong to a loop, a branch or a function."""
    context = control_flow_context(graph)
    while context is not None:
        if context.IsWhileContext() or context.IsCondContext():
            return True
        context = context.outer_context
    return getattr(graph, "outer_graph", None) is not None


def is_in_loop(made: tf.Graph | tf.Operation) -> bool:
    """Returns whether an operation, or what a graph gets now, is in a loop or a function."""
    context = made._get_control_flow_context()
    is_in_function = getattr(made, "outer_graph", None) is not None
    return is_in_function or (context is not None and context.GetWhileContext() is not None)


@contextlib.contextmanager
def control_flow_v1() -> Iterator[None]:
    """Lets ``tf.cond`` make its operations in the graph itself, as after `disable_v2_behavior`.

    Where TensorFlow 2's control flow is on, a branch is a graph of its own, and what it makes is of
    no use to the lowering outside.
    """
    # Inside of a tf.function it is on in any case: asked there, TensorFlow does not say what the
    # switch is at.
    with tf.Graph().as_default():
        is_on = tf.control_flow_v2_enabled()
    if not is_on:
        yield
        return
    tf.disable_control_flow_v2()
    try:
        yield
    finally:
        tf.enable_control_flow_v2()


def replace_capture(func_graph: tf.Graph, make: Callable[[tf.Tensor], tf.Tensor | None]) -> None:
    """Replaces tensors from outside that a function would otherwise capture.

    Call it while a ``tf.function`` is traced, with its graph. `make` returns the tensor to use in
    place of a tensor of another graph, or None to capture that as usual.
    """
    capture = func_graph.capture

    def make_or_capture(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # Eager tensors have no graph.
        outside = getattr(tensor, "graph", func_graph) is not func_graph
        made = make(tensor) if outside else None
        return capture(tensor, *args, **kwargs) if made is None else made

    func_graph.capture = make_or_capture


_WRITES = ("Assign", "Resource", "Scatter", "Apply", "SparseApply")
_READS = frozenset(["ResourceGather", "ResourceGatherNd"])
_CALLS = frozenset(["StatefulPartitionedCall", "PartitionedCall", "If", "While", "Case"])
_PASSES_ON = frozenset(["Identity", "Enter", "Switch", "RefIdentity", "RefEnter", "RefSwitch"])


def variable_key(handle: tf.Operation) -> str:
    """Returns a name that all handles of one variable have in common, in functions too."""
    shared = handle.get_attr("shared_name") if handle.type == "VarHandleOp" else b""
    return shared.decode() or handle.name


def calls_function(operation: tf.Operation) -> bool:
    """Returns whether an operation runs functions, such as a conditional of control flow v2."""
    return operation.type in _CALLS


def variables_written(operation: tf.Operation) -> list[str]:
    """Returns the keys of variables that an operation writes; see `variable_key`.

    One that calls a function writes those that the function takes for more than reading.
    """
    is_call = calls_function(operation)
    if not is_call and (operation.type in _READS or not operation.type.startswith(_WRITES)):
        return []
    inputs = list(operation.inputs)
    if is_call and "_read_only_resource_inputs" in operation.node_def.attr:
        for number in sorted(operation.get_attr("_read_only_resource_inputs"), reverse=True):
            del inputs[number]
    return [
        variable_key(_handle_behind(x).op)
        for x in inputs
        if x.dtype == tf.resource or x.dtype != x.dtype.base_dtype
    ]


def _handle_behind(handle: tf.Tensor) -> tf.Tensor:
    """Returns what a tensor is passed on from, also from outside of a function."""
    while True:
        captures = getattr(handle.graph, "captures", ())  # of a function
        outside = [outer for outer, inner in captures if inner.name == handle.name]
        if handle.op.type in _PASSES_ON:
            handle = handle.op.inputs[0]
        elif outside:
            handle = outside[0]
        else:
            return handle


class TracedFunction(NamedTuple):
    """The operations that a Python function of TensorFlow tensors makes.

    Attributes:
      operations: all of them, in the order in which they were made; placeholders included.
      inputs: the placeholder of each argument.
      captures: pairs of a tensor from outside that the function uses, and its placeholder.
      outputs: the function's results, flattened; each may be a placeholder.
    """

    operations: list[tf.Operation]
    inputs: list[tf.Tensor]
    captures: list[tuple[Any, tf.Tensor]]
    outputs: list[tf.Tensor]


def trace_function(tf_fn: Callable[..., Any], input_specs: Sequence[Any]) -> TracedFunction:
    """Runs a function of a tensor for each spec in a graph of its own, and returns what it made.

    Nothing is added to the current graph, even if the function uses tensors of it, but variables
    that the function makes are listed in its collections. Conditionals and loops are of control
    flow v2.
    """
    from tensorflow.python.framework import func_graph

    graph = func_graph.FuncGraph("trace")
    with graph.as_default():
        inputs = [tf.placeholder(spec.dtype, spec.shape) for spec in input_specs]
        # capture returns a tensor of its own graph as it is.
        outputs = [graph.capture(tf.convert_to_tensor(x)) for x in tf.nest.flatten(tf_fn(*inputs))]
    return TracedFunction(graph.get_operations(), inputs, list(graph.captures), outputs)


# `OpKernelContext::Params::kNeverForward`: a kernel writes the output into memory of its own.
_NEVER_FORWARD = -2


def write_to_own_memory(operation: tf.Operation) -> None:
    """Keeps an operation's kernel from writing its output into the memory of its first input.

    An `AddN` then adds up in its inputs' order: it begins with the input whose memory it takes. The
    attribute ``_forward_input`` holds pairs of an input and the output that its memory is for.
    """
    pairs = tf.AttrValue.ListValue(i=[_NEVER_FORWARD, 0])
    set_attr(operation, "_forward_input", tf.AttrValue(list=pairs))


def collective_sum(
    tensor: tf.Tensor, group_size: int, group_key: int, instance_key: int, timeout_seconds: float
) -> tf.Tensor:
    """Returns a sum over a group of which this is one member, by TensorFlow's own operation.

    The tensor has one shape and dtype in the group: float32, float64, int32 or int64. `group_key`
    identifies the group's devices, and `instance_key` one sum of its members. A timeout of 0 waits
    for the other members for ever.
    """
    from tensorflow.python.ops import collective_ops

    return collective_ops.all_reduce_v2(
        tensor, group_size, group_key, instance_key, timeout=timeout_seconds
    )


def local_devices() -> Sequence[Any]:
    """Returns TensorFlow's `DeviceAttributes` of this process's devices, links included."""
    from tensorflow.python.client import device_lib

    return device_lib.list_local_devices()
