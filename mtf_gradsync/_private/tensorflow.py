"""Access to what the core uses of TensorFlow that has no public name or use: a function for each.

All functions of this module were checked with TensorFlow 2.12 to 2.21. ``tests/private`` has a test
of each function, which fails if another version of TensorFlow changes what the function relies on.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from typing import Any, Callable, ContextManager, Iterator, NamedTuple, Sequence

from tensorflow.python.ops import variable_scope

from mtf_gradsync._common import walk
from mtf_gradsync._private.libraries import tf


def set_attr(operation: tf.Operation, name: str, value: tf.AttrValue) -> None:
    """Sets an attribute of a tf operation that has not run yet; TensorFlow does not check it."""
    operation._set_attr(name, value)


def root_scope() -> ContextManager[tf.VariableScope]:
    """Returns a context in which variable names are full names: no scope adds a prefix."""
    root = tf.VariableScope(reuse=tf.get_variable_scope().reuse, name="")
    return tf.variable_scope(root, auxiliary_name_scope=False)


def forget_closed_scopes() -> None:
    """Removes variable scopes from TensorFlow's table of counts if their count is 0.

    Removing the scopes saves time and changes nothing else: a scope without an entry in the table
    also counts as 0. TensorFlow looks through all entries whenever a variable scope ends, and
    Mesh-TF opens a variable scope for each processor of each operation that it lowers.
    """
    store = variable_scope.get_variable_scope_store()
    counts = store.variable_scopes_count
    store.variable_scopes_count = {name: count for name, count in counts.items() if count}


# The attribute of a global step for the operations that its increments wait for.
_WAITED_FOR = "_mtf_gradsync_waited_for"


def advance_step_after(step: Any, reads: Sequence[tf.Operation]) -> None:
    """Makes increments of a global step wait for the operations `reads`, later increments too.

    `step` is the resource variable of the global step. An increment does not wait for an operation
    of `reads` that itself waits for this increment already. Increments in loops, branches and
    functions do not wait, because the variable has another handle inside of them.
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
    """Returns the branch or loop of control flow v1 that is being built, or None."""
    return graph._get_control_flow_context()


def in_loop_or_branch(graph: tf.Graph) -> bool:
    """Returns whether operations made in `graph` now belong to a loop, a branch or a function."""
    context = control_flow_context(graph)
    while context is not None:
        if context.IsWhileContext() or context.IsCondContext():
            return True
        context = context.outer_context
    return getattr(graph, "outer_graph", None) is not None


def is_in_loop(made: tf.Graph | tf.Operation) -> bool:
    """Returns whether a tf operation is in a loop or in a function's graph.

    If the argument is a graph, the result says whether operations that are made in the graph now
    are in a loop or in a function's graph.
    """
    context = made._get_control_flow_context()
    is_in_function = getattr(made, "outer_graph", None) is not None
    return is_in_function or (context is not None and context.GetWhileContext() is not None)


@contextlib.contextmanager
def control_flow_v1() -> Iterator[None]:
    """Returns a context in which ``tf.cond`` adds the operations of branches to the graph itself.

    With TensorFlow 2's control flow, a branch is a graph of its own, and a lowering outside of the
    branch cannot use the branch's tensors.
    """
    # Inside of a tf.function control flow v2 is always on. TensorFlow is asked in another graph, to
    # learn whether the program has switched it on.
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
    """Makes a ``tf.function`` use other tensors in place of those that it would capture.

    Call `replace_capture` while the ``tf.function`` is traced. `func_graph` is the graph of the
    ``tf.function``. `make` gets a tensor of another graph, and returns the tensor to use in its
    place, or None to capture the given tensor as usual.
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
    """Returns a name that is the same for all handles of one variable, also inside of functions.

    `handle` is the operation that makes a handle (`VarHandleOp`), or the operation of a ref
    variable.
    """
    shared = handle.get_attr("shared_name") if handle.type == "VarHandleOp" else b""
    return shared.decode() or handle.name


def calls_function(operation: tf.Operation) -> bool:
    """Returns whether an operation runs functions, such as a conditional of control flow v2."""
    return operation.type in _CALLS


def variables_written(operation: tf.Operation) -> list[str]:
    """Returns the keys of variables that an operation writes; see `variable_key`.

    An operation that calls a function counts as writing all variables that it passes to the
    function, except those that the function only reads.
    """
    is_call = calls_function(operation)
    if not is_call and (operation.type in _READS or not operation.type.startswith(_WRITES)):
        return []
    inputs = list(operation.inputs)
    if is_call and "_read_only_resource_inputs" in operation.node_def.attr:
        for number in sorted(operation.get_attr("_read_only_resource_inputs"), reverse=True):
            del inputs[number]
    return [
        variable_key(_original_handle(x).op)
        for x in inputs
        if x.dtype == tf.resource or x.dtype != x.dtype.base_dtype
    ]


def _original_handle(handle: tf.Tensor) -> tf.Tensor:
    """Returns the original handle of a variable that `handle` is a copy of.

    Operations such as `Identity` make copies of a handle, and so do functions that capture it.
    """
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
    """The operations that a Python function of TensorFlow tensors makes when it is called.

    Attributes:
      operations: all operations in the order in which they were made, placeholders included.
      inputs: the placeholder of each argument.
      captures: pairs of a tensor that the function uses but neither makes nor gets as an argument,
        and the placeholder for this tensor.
      outputs: the function's results, flattened; each may be a placeholder.
    """

    operations: list[tf.Operation]
    inputs: list[tf.Tensor]
    captures: list[tuple[Any, tf.Tensor]]
    outputs: list[tf.Tensor]


def trace_function(tf_fn: Callable[..., Any], input_specs: Sequence[Any]) -> TracedFunction:
    """Returns the operations that a function makes for arguments of the given specs.

    The function is called in a graph of its own. No operation is added to the current graph, even
    if the function uses tensors of the current graph; only variables that the function makes are
    added to the current graph's collections. Conditionals and loops are of control flow v2.
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


def write_to_new_memory(operation: tf.Operation) -> None:
    """Makes an operation write its output into new memory, not into that of an input.

    An `AddN` that writes into new memory adds up its inputs in their order. An `AddN` that reuses
    the memory of an input begins with this input, which can differ from run to run. The attribute
    ``_forward_input`` holds pairs of an input and the output that may use the input's memory.
    """
    pairs = tf.AttrValue.ListValue(i=[_NEVER_FORWARD, 0])
    set_attr(operation, "_forward_input", tf.AttrValue(list=pairs))


def collective_sum(
    tensor: tf.Tensor, group_size: int, group_key: int, instance_key: int, timeout_seconds: float
) -> tf.Tensor:
    """Returns one member's copy of a sum over a group of devices, by TensorFlow's collective.

    `tensor` is the member's own value. All members have the same shape and dtype: float32, float64,
    int32 or int64. `group_size` is the number of members. `group_key` identifies the group of
    devices, and `instance_key` this sum. If the other members do not come within `timeout_seconds`,
    the collective fails with DeadlineExceededError. With a timeout of 0, a member waits for ever.
    """
    from tensorflow.python.ops import collective_ops

    return collective_ops.all_reduce_v2(
        tensor, group_size, group_key, instance_key, timeout=timeout_seconds
    )


def local_devices() -> Sequence[Any]:
    """Returns TensorFlow's `DeviceAttributes` of this process's devices, with their links."""
    from tensorflow.python.client import device_lib

    return device_lib.list_local_devices()


def moving_average_settings(average: tf.train.ExponentialMovingAverage) -> tuple[Any, Any, bool]:
    """Returns the arguments `decay`, `num_updates` and `zero_debias` of a moving average."""
    return average._decay, average._num_updates, average._zero_debias


def checkpoint_initializers() -> list[Any]:
    """Returns the two modules that have `init_from_checkpoint` as an attribute, for a patch of it.

    The modules are `tf.train` and the module that defines the function.
    """
    return [tf.train, sys.modules[tf.train.init_from_checkpoint.__module__]]


def hyperparameters(optimizer: tf.train.Optimizer, call: bool = True) -> dict[str, Any]:
    """Returns the arguments that an optimizer of `tf.compat.v1.train` was made with, by name.

    The optimizer is of one of the seven classes that `MeshOptimizer` takes, and not of a subclass
    that a program defines. If `call` is true, arguments that are functions are called, and their
    results are returned in place of the functions.
    """
    found = {}
    of_all = inspect.signature(tf.train.Optimizer).parameters  # such as use_locking and name
    for name in inspect.signature(type(optimizer)).parameters:
        if name not in of_all:
            # Adam and Adadelta keep the learning rate as `_lr`; all others are kept by name.
            is_short = name == "learning_rate" and hasattr(optimizer, "_lr")
            value = getattr(optimizer, "_lr" if is_short else f"_{name}")
            found[name] = value() if call and callable(value) else value
    return found


# No stack has more optimizers. An object that invents its attributes would go on without end.
_MOST_INSIDE = 100


def stack_of(optimizer: Any, names: Sequence[str], method: str = "") -> list[Any]:
    """Returns an optimizer and the optimizers inside it, outermost first.

    `names` are names of attributes that may hold an inner optimizer. The first of them that is not
    None is followed. If `method` is given, an inner optimizer must also have a method of this name.
    Raises a ValueError if an optimizer contains itself.
    """
    found: list[Any] = []
    while optimizer is not None:
        again = next((i for i, one in enumerate(found) if one is optimizer), None)
        found.append(optimizer)
        if again is not None or len(found) > _MOST_INSIDE:
            shown = found[-3:] if again is None else found[again:]
            stack = " > ".join(type(one).__name__ for one in shown)
            raise ValueError(
                f"An optimizer contains itself: {stack} (each is around the next one). A stack has "
                "to end with an optimizer that has no other one inside."
            )
        held = [getattr(optimizer, name, None) for name in names]
        fits = (x for x in held if not method or callable(getattr(x, method, None)))
        optimizer = next((x for x in fits if x is not None), None)
    return found


def optimizers_inside(optimizer: Any) -> list[Any]:
    """Returns an optimizer of ``tf.compat.v1`` and all optimizers inside it, outermost first."""
    return stack_of(optimizer, ("_opt", "_optimizer"))


def create_slots(optimizer: tf.train.Optimizer, variables: Sequence[Any]) -> None:
    """Makes the slots of `variables` in an optimizer and in all optimizers inside it.

    Without this call, the first update of the optimizers makes the slots.
    """
    for inside in optimizers_inside(optimizer):
        with tf.init_scope():
            inside._create_slots(variables)


def number_of_tpu_shards() -> int | None:
    """Returns the number of shards of the TPU program that is being built; None if none is."""
    from tensorflow.python.tpu import tpu_function

    return tpu_function.get_tpu_context().number_of_shards


#: The attribute that names the group of sums that an operation is one of.
TOGETHER_ATTR = "_mtf_gradsync_together"


@contextlib.contextmanager
def summed_together() -> Iterator[None]:
    """Returns a context; sums over cores that are made inside are marked as one group of sums.

    The compiler may combine the sums of a group into one message.
    """
    graph = tf.get_default_graph()
    name = graph.unique_name("summed_together").encode()
    with graph._attr_scope({TOGETHER_ATTR: tf.AttrValue(s=name)}):
        yield


def cross_replica_scatter(
    tensor: tf.Tensor, groups: Sequence[Sequence[int]], dimension: int
) -> tf.Tensor:
    """Returns this core's part of a sum over its group of cores, in a TPU program.

    Groups are lists of physical core numbers. The sum is cut along `dimension` into as many parts
    as a group has members. Member i of a group gets part i.
    """
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    return gen_xla_ops.xla_reduce_scatter(
        input=tensor,
        group_assignment=tf.constant(groups, tf.int32),
        scatter_dimension=tf.constant(dimension, tf.int32),
        reduce_op="Add",
    )


def cross_replica_rows(rows: tf.Tensor, groups: Sequence[Sequence[int]]) -> tf.Tensor:
    """Exchanges rows among the cores of each group, in a TPU program.

    Each core has a tensor `rows` of shape ``[size of a group, ...]``, and sends row i to member i
    of its group. Row i of the core's result is the row that it received from member i. `groups` are
    lists of physical core numbers.
    """
    from tensorflow.python.tpu.ops import tpu_ops

    return tpu_ops.all_to_all(
        rows,
        concat_dimension=0,
        split_dimension=0,
        split_count=len(groups[0]),
        group_assignment=[list(group) for group in groups],
    )


# The attribute of an AllToAll in which each core sends the same to all others.
GATHERS = "_mtf_gradsync_gathers"
#: The attribute of a `where` that is there for the TPU compiler and always gives its second input.
PASSES_ON = "_mtf_gradsync_passes_on"


def cross_replica_gather(part: tf.Tensor, groups: Sequence[Sequence[int]], axis: int) -> tf.Tensor:
    """Returns the parts of all cores of a group, joined along `axis`, on each core (TPU programs).

    TensorFlow has no all-gather for TPUs. So each core sends its `part` to all others by
    ``AllToAll``, which sends as many bytes as an all-gather would. The operation gets the attribute
    `GATHERS`. `groups` are lists of physical core numbers.
    """
    from tensorflow.python.tpu.ops import tpu_ops

    size, shape = len(groups[0]), part.shape.as_list()
    received = tpu_ops.all_to_all(
        tf.broadcast_to(part[tf.newaxis], [size, *shape]),
        concat_dimension=1 + axis,
        split_dimension=0,
        split_count=size,
        group_assignment=[list(group) for group in groups],
    )
    set_attr(received.op, GATHERS, tf.AttrValue(b=True))
    shape[axis] *= size
    return tf.reshape(received, shape)
