"""Parts of TensorFlow without a public name, or use, that the core uses; one function each.

All were checked with TensorFlow 2.12 to 2.21; ``tests/private`` has a test of each, which fails if
a version changes its meaning.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Callable, ContextManager, Iterator, NamedTuple, Sequence

from tensorflow.python.ops import variable_scope
from tensorflow.python.training import training_util

from mtf_gradsync._common import walk
from mtf_gradsync._private.libraries import tf


def set_attr(operation: tf.Operation, name: str, value: tf.AttrValue) -> None:
    """Sets an attribute of an operation that has not run yet; TensorFlow does not check it."""
    operation._set_attr(name, value)


def advance_step_after_reads(graph: tf.Graph) -> None:
    """Makes increments of the global step wait for its reads in the same step.

    Otherwise a hook, or a printed line, gets the step before the increment in one run and the step
    after it in another. A second call orders the reads made since.
    """
    step = tf.train.get_global_step(graph)
    if step is None or not hasattr(step, "handle"):  # a ref variable's reads have no operation
        return
    of_hooks = training_util._get_or_create_global_step_read(graph).op
    reads = [op for op in step.handle.consumers() if op.type == "ReadVariableOp"]
    advance_step_after(step, [*reads, of_hooks])


def root_scope() -> ContextManager[tf.VariableScope]:
    """Makes variable names full names inside the block: the variable scope adds no prefix."""
    root = tf.VariableScope(reuse=tf.get_variable_scope().reuse, name="")
    return tf.variable_scope(root, auxiliary_name_scope=False)


def forget_closed_scopes() -> None:
    """Forgets the counts of variable scopes that are 0, as they are without an entry, too.

    A variable scope that ends looks through all entries. Mesh-TF opens one for each processor of
    each operation that it lowers, in a graph with a scope for each layer of a model.
    """
    store = variable_scope.get_variable_scope_store()
    counts = store.variable_scopes_count
    store.variable_scopes_count = {name: count for name, count in counts.items() if count}


# The attribute of a global step for the operations that its increments wait for.
_WAITED_FOR = "_mtf_gradsync_waited_for"


def advance_step_after(step: Any, reads: Sequence[tf.Operation]) -> None:
    """Makes increments of a global step wait for operations, also for later ones.

    A read that is ordered after an increment stays after it. Increments in loops, branches and
    functions do not wait: there the step has another handle.
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
    """Returns whether operations made now belong to a loop, a branch or a function."""
    context = control_flow_context(graph)
    while context is not None:
        if context.IsWhileContext() or context.IsCondContext():
            return True
        context = context.outer_context
    return getattr(graph, "outer_graph", None) is not None


def is_in_loop(made: tf.Graph | tf.Operation) -> bool:
    """Returns whether an operation, or one that a graph gets now, is in a loop or a function."""
    context = made._get_control_flow_context()
    is_in_function = getattr(made, "outer_graph", None) is not None
    return is_in_function or (context is not None and context.GetWhileContext() is not None)


@contextlib.contextmanager
def control_flow_v1() -> Iterator[None]:
    """Makes ``tf.cond`` add its operations to the graph itself, inside the block.

    Where TensorFlow 2's control flow is on, a branch is a graph of its own, whose tensors the
    lowering outside cannot use.
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
    """Returns a name that all handles of one variable share, also in functions."""
    shared = handle.get_attr("shared_name") if handle.type == "VarHandleOp" else b""
    return shared.decode() or handle.name


def calls_function(operation: tf.Operation) -> bool:
    """Returns whether an operation runs functions, such as a conditional of control flow v2."""
    return operation.type in _CALLS


def variables_written(operation: tf.Operation) -> list[str]:
    """Returns the keys of variables that an operation writes; see `variable_key`.

    An operation that calls a function writes the variables that the function takes for more than
    reading.
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
    """Returns the tensor that others pass on, also from outside of a function."""
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
      operations: all operations in the order in which they were made, with placeholders.
      inputs: the placeholder of each argument.
      captures: pairs of a tensor from outside that the function uses, and its placeholder.
      outputs: the function's results, flattened; each may be a placeholder.
    """

    operations: list[tf.Operation]
    inputs: list[tf.Tensor]
    captures: list[tuple[Any, tf.Tensor]]
    outputs: list[tf.Tensor]


def trace_function(tf_fn: Callable[..., Any], input_specs: Sequence[Any]) -> TracedFunction:
    """Traces a function in its own graph, with a tensor for each spec.

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
    """Keeps an operation's kernel from writing its output into its first input's memory.

    An `AddN` then adds up in its inputs' order; otherwise it begins with the input whose memory it
    reuses. The attribute ``_forward_input`` holds pairs of an input and the output that its memory
    is for.
    """
    pairs = tf.AttrValue.ListValue(i=[_NEVER_FORWARD, 0])
    set_attr(operation, "_forward_input", tf.AttrValue(list=pairs))


def collective_sum(
    tensor: tf.Tensor, group_size: int, group_key: int, instance_key: int, timeout_seconds: float
) -> tf.Tensor:
    """Returns a sum over a group with this member, by TensorFlow's own operation.

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


def variables_of_saver(saver: tf.train.Saver) -> set[str] | None:
    """Returns the names of a saver's variables; None if it has none or only a SaverDef."""
    given = saver._var_list
    if given is None:
        return None
    variables = given.values() if isinstance(given, dict) else given
    return {v.op.name for v in variables if hasattr(v, "op")}


class MovingAverageSettings(NamedTuple):
    """The arguments of a `tf.train.ExponentialMovingAverage`, numbers or tensors."""

    decay: Any
    num_updates: Any
    zero_debias: bool


def moving_average_settings(
    average: tf.train.ExponentialMovingAverage,
) -> MovingAverageSettings:
    """Returns the arguments of a moving average."""
    return MovingAverageSettings(average._decay, average._num_updates, average._zero_debias)


def initializer_of(variable: tf.Variable) -> tuple[Any, Any]:
    """Returns the operation that initializes a variable, and its initial value."""
    return variable.initializer, variable._initial_value


def give_initializer(variable: tf.Variable, initializer: tuple[Any, Any]) -> None:
    """Sets a variable's initializer and initial value, as `init_from_checkpoint` does."""
    variable._initializer_op, variable._initial_value = initializer


def checkpoint_initializers() -> list[Any]:
    """Returns the modules in which programs find init_from_checkpoint."""
    return [tf.train, sys.modules[tf.train.init_from_checkpoint.__module__]]


# The constructor's arguments of each, by the attributes that hold them.
_HYPERPARAMETERS = {
    "GradientDescentOptimizer": {"learning_rate": "_learning_rate"},
    "MomentumOptimizer": {
        "learning_rate": "_learning_rate",
        "momentum": "_momentum",
        "use_nesterov": "_use_nesterov",
    },
    "AdagradOptimizer": {
        "learning_rate": "_learning_rate",
        "initial_accumulator_value": "_initial_accumulator_value",
    },
    "AdamOptimizer": {
        "learning_rate": "_lr",
        "beta1": "_beta1",
        "beta2": "_beta2",
        "epsilon": "_epsilon",
    },
    "RMSPropOptimizer": {
        "learning_rate": "_learning_rate",
        "decay": "_decay",
        "momentum": "_momentum",
        "epsilon": "_epsilon",
        "centered": "_centered",
    },
    "AdadeltaOptimizer": {"learning_rate": "_lr", "rho": "_rho", "epsilon": "_epsilon"},
    "FtrlOptimizer": {
        "learning_rate": "_learning_rate",
        "learning_rate_power": "_learning_rate_power",
        "initial_accumulator_value": "_initial_accumulator_value",
        "l1": "_l1_regularization_strength",
        "l2": "_l2_regularization_strength",
        "l2_shrinkage": "_l2_shrinkage_regularization_strength",
        "beta": "_beta",
        "accum_name": "_accum_name",
        "linear_name": "_linear_name",
    },
}


def hyperparameters(optimizer: tf.train.Optimizer, call: bool = True) -> dict[str, Any]:
    """Returns the constructor's arguments, by name, of an optimizer of `tf.compat.v1.train`.

    The optimizer is of one of the seven classes, not of a user's subclass. With `call`, arguments
    that are functions are called.
    """
    attributes = _HYPERPARAMETERS[type(optimizer).__name__]
    found = {name: getattr(optimizer, attribute) for name, attribute in attributes.items()}
    return {name: value() if call and callable(value) else value for name, value in found.items()}


# No stack of optimizers has as many; an object that makes up its attributes has no end.
_MOST_INSIDE = 100


def each_inside(optimizer: Any, names: Sequence[str], method: str = "") -> list[Any]:
    """Returns an optimizer and the optimizers inside it, outermost first.

    The optimizer directly inside another is its first attribute of `names` that is not None and, if
    `method` is given, has this method. Raises a ValueError if an optimizer contains itself.
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
    return each_inside(optimizer, ("_opt", "_optimizer"))


def create_slots(optimizer: tf.train.Optimizer, variables: Sequence[Any]) -> None:
    """Makes an optimizer's slots, which otherwise come with its first update."""
    for inside in optimizers_inside(optimizer):
        with tf.init_scope():
            inside._create_slots(variables)


def number_of_tpu_shards() -> int | None:
    """Returns the number of shards of the TPU program that is being built, or None."""
    from tensorflow.python.tpu import tpu_function

    return tpu_function.get_tpu_context().number_of_shards


#: The attribute that names the group of sums that an operation is one of.
TOGETHER_ATTR = "_mtf_gradsync_together"


@contextlib.contextmanager
def summed_together() -> Iterator[None]:
    """Marks sums over cores that are made inside as one group, under a new name."""
    graph = tf.get_default_graph()
    name = graph.unique_name("summed_together").encode()
    with graph._attr_scope({TOGETHER_ATTR: tf.AttrValue(s=name)}):
        yield


def cross_replica_scatter(
    tensor: tf.Tensor, groups: Sequence[Sequence[int]], dimension: int
) -> tf.Tensor:
    """Returns this core's part of a sum over groups of the cores of a TPU program.

    Groups are of physical core numbers. The dimension is cut into as many parts as a group has
    members, and each gets the part at its position.
    """
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    return gen_xla_ops.xla_reduce_scatter(
        input=tensor,
        group_assignment=tf.constant(groups, tf.int32),
        scatter_dimension=tf.constant(dimension, tf.int32),
        reduce_op="Add",
    )


def cross_replica_rows(rows: tf.Tensor, groups: Sequence[Sequence[int]]) -> tf.Tensor:
    """Exchanges rows of ``[size of a group, ...]`` among the cores of each group of a TPU program.

    Each core sends the row at a position to the group's member there, and the result has the row
    that this member sent at the same position.
    """
    from tensorflow.python.tpu.ops import tpu_ops

    return tpu_ops.all_to_all(
        rows,
        concat_dimension=0,
        split_dimension=0,
        split_count=len(groups[0]),
        group_assignment=[list(group) for group in groups],
    )


# On an AllToAll in which each core sends the same to all.
GATHERS = "_mtf_gradsync_gathers"
#: The attribute of a `where` that is there for the TPU compiler and always gives its second input.
PASSES_ON = "_mtf_gradsync_passes_on"


def cross_replica_gather(part: tf.Tensor, groups: Sequence[Sequence[int]], axis: int) -> tf.Tensor:
    """Returns, on each core of a group of a TPU program, the parts of all, joined along `axis`.

    TensorFlow has no all-gather for TPUs: each core sends its part to each other by ``AllToAll``,
    which sends the same bytes and gets the attribute `GATHERS`.
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
