"""What this package uses of TensorFlow that has no public name, one function each.

Every function names the versions that it was read on; ``tests/private/test_tensorflow.py`` has a
test of each that fails where a version means something else.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, ContextManager, Iterator, NamedTuple, Sequence

import numpy as np

from mtf_gradsync._private.libraries import tf

# Operations and graphs.


def set_attr(operation: tf.Operation, name: str, value: tf.AttrValue) -> None:
    """Sets an attribute of an operation that stands in a graph and has not run yet.

    Read on TensorFlow 2.12 to 2.21, which check neither name nor value here.
    """
    operation._set_attr(name, value)


def control_flow_context(graph: tf.Graph) -> Any:
    """The branch or loop of control flow v1 that is being built, None outside of any.

    Read on TensorFlow 2.12 to 2.21.
    """
    return graph._get_control_flow_context()


def replace_capture(func_graph: tf.Graph, make: Callable[[tf.Tensor], tf.Tensor | None]) -> None:
    """Puts something else into a function where it would capture a tensor from outside.

    Read on TensorFlow 2.12 to 2.21: ``FuncGraph`` hands every tensor that an operation uses to its
    method ``capture``.

    Args:
      func_graph: the graph of a ``tf.function`` while it is traced, its default graph then.
      make: takes a tensor of another graph. Returns a tensor of this one that the function is to
        use in its place, or None to capture it as usual.
    """
    capture = func_graph.capture

    def make_or_capture(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # Eager tensors have no graph.
        outside = getattr(tensor, "graph", func_graph) is not func_graph
        made = make(tensor) if outside else None
        return capture(tensor, *args, **kwargs) if made is None else made

    func_graph.capture = make_or_capture


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


# Sums.

# `OpKernelContext::Params::kNeverForward`: a kernel writes the output into memory of its own.
_NEVER_FORWARD = -2


def write_to_own_memory(operation: tf.Operation) -> None:
    """Keeps an operation's kernel from writing its output into the memory of its first input.

    An `AddN` then adds up in its inputs' order: it begins with the input whose memory it takes.

    Read on TensorFlow 2.12 to 2.21: the executor takes from the attribute ``_forward_input`` which
    input's memory is reserved for which output, in pairs.
    """
    pairs = tf.AttrValue.ListValue(i=[_NEVER_FORWARD, 0])
    set_attr(operation, "_forward_input", tf.AttrValue(list=pairs))


def collective_sum(
    tensor: tf.Tensor, group_size: int, group_key: int, instance_key: int, timeout_seconds: float
) -> tf.Tensor:
    """One member's part in a sum over a group: the operation that TensorFlow's strategies use.

    Read on TensorFlow 2.12 to 2.21.

    Args:
      tensor: what this member adds, of one shape and dtype in the group: float32, float64, int32
        or int64.
      group_size: how many members there are.
      group_key: names the group's devices, the same for all its collectives.
      instance_key: names this sum, the same for its members and for no other sum.
      timeout_seconds: how long to wait for the others before it is an error; 0 is for ever.

    Returns:
      The sum.
    """
    from tensorflow.python.ops import collective_ops

    return collective_ops.all_reduce_v2(
        tensor, group_size, group_key, instance_key, timeout=timeout_seconds
    )


# Devices.


def local_devices() -> Sequence[Any]:
    """TensorFlow's `DeviceAttributes` of the devices that this process has.

    Read on TensorFlow 2.12 to 2.21; the public names leave out links between devices.
    """
    from tensorflow.python.client import device_lib

    return device_lib.list_local_devices()


# Training.


class MovingAverageSettings(NamedTuple):
    """How a `tf.train.ExponentialMovingAverage` was made.

    Attributes:
      decay: a number, or a tensor.
      num_updates: what the decay is bounded by, None for nothing.
      zero_debias: whether averages start at zero and are corrected for that.
    """

    decay: Any
    num_updates: Any
    zero_debias: bool


def moving_average_settings(
    average: tf.train.ExponentialMovingAverage,
) -> MovingAverageSettings:
    """The arguments of a moving average.

    Read on TensorFlow 2.12 to 2.21.
    """
    return MovingAverageSettings(average._decay, average._num_updates, average._zero_debias)


# TPU programs.

#: The attribute that says which TPU program an operation belongs to. TensorFlow 2.12 to 2.21.
TPU_PROGRAM_ATTR = "_tpu_replicate"


@contextlib.contextmanager
def tpu_replicate_context(name: str, num_replicas: int, pivot: tf.Operation) -> Iterator[None]:
    """Marks the operations made inside as part of a TPU program.

    Read on TensorFlow 2.12, which has the class in ``tpu.tpu``, and on 2.13 to 2.21.

    Args:
      name: name of the program.
      num_replicas: how many cores run it.
      pivot: an operation outside that stands for the program's beginning.

    Yields:
      Nothing.
    """
    from tensorflow.python.tpu import tpu as home

    if not hasattr(home, "TPUReplicateContext"):
        from tensorflow.python.tpu import tpu_replication as home

    context = home.TPUReplicateContext(name=name, num_replicas=num_replicas, pivot=pivot)
    context.Enter()
    try:
        yield
    finally:
        context.Exit()


def tpu_replicate_metadata(num_replicas: int) -> tf.Operation:
    """The operation that says how many cores run the TPU program around it.

    Read on TensorFlow 2.12 to 2.21.
    """
    from tensorflow.python.tpu.ops import tpu_ops

    return tpu_ops.tpu_replicate_metadata(num_replicas=num_replicas)


def tpu_shard_context(num_replicas: int) -> ContextManager[None]:
    """Tells functions called inside, such as ``tf.tpu.cross_replica_sum``, the number of cores.

    Read on TensorFlow 2.12 to 2.21.
    """
    from tensorflow.python.tpu import tpu_function

    return tpu_function.tpu_shard_context(num_replicas)


def tpu_replicated_input(tensors: Sequence[tf.Tensor], name: str) -> tf.Tensor:
    """One tensor of a TPU program that has another value on every core.

    Read on TensorFlow 2.12 to 2.21.

    Args:
      tensors: one tensor for each core, all of one dtype and shape.
      name: name of the operation.

    Returns:
      The tensor, made in whatever contexts are open.
    """
    from tensorflow.python.tpu.ops import tpu_ops

    return tpu_ops.tpu_replicated_input(list(tensors), name=name)


@functools.lru_cache(maxsize=None)
def kernel_devices(op_type: str) -> frozenset[str]:
    """The kinds of devices that TensorFlow can run a type of operation on.

    Kept, because TensorFlow looks through thousands of kernels for each answer. Read on
    TensorFlow 2.12 to 2.21.

    Args:
      op_type: a type that TensorFlow itself registers.

    Returns:
      Names such as "CPU"; "DEFAULT" stands for all devices.
    """
    from tensorflow.python.framework import kernels

    return frozenset(k.device_type for k in kernels.get_registered_kernels_for_op(op_type).kernel)


# XLA.


def eager_mode() -> ContextManager[None]:
    """Switches eager execution on for a while, also where ``disable_v2_behavior`` was called.

    Read on TensorFlow 2.12 to 2.21.
    """
    from tensorflow.python.eager import context

    return context.eager_mode()


def xla_custom_call(
    operand: tf.Tensor, target: str, settings: str, shape: Sequence[int]
) -> tf.Tensor:
    """An operation that TensorFlow's bridge turns into a custom call of XLA.

    Read on TensorFlow 2.12 to 2.21.

    Args:
      operand: its input.
      target: what is called.
      settings: the call's ``backend_config``.
      shape: of its result, which has the input's dtype.

    Returns:
      The result.
    """
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    (result,) = gen_xla_ops.xla_custom_call_v2(
        operands=[operand],
        call_target_name=target,
        backend_config=settings,
        has_side_effect=False,
        result_dtypes=[operand.dtype],
        result_shapes=[tf.TensorShape(shape)],
    )
    return result


def cross_replica_scatter(
    tensor: tf.Tensor, groups: Sequence[Sequence[int]], dimension: int
) -> tf.Tensor:
    """A sum over groups of the cores of a TPU program, of which each core gets its own part.

    ``XlaReduceScatter`` read on TensorFlow 2.12 to 2.21.

    Args:
      tensor: what this core adds.
      groups: lists of physical core numbers; the member at a position gets the part there.
      dimension: the dimension that is cut, which the size of a group divides.

    Returns:
      The part of the sum.
    """
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    return gen_xla_ops.xla_reduce_scatter(
        input=tensor,
        group_assignment=tf.constant(groups, tf.int32),
        scatter_dimension=tf.constant(dimension, tf.int32),
        reduce_op="Add",
    )


# On an AllToAll in which each core sends the same to all.
GATHERS = "_mtf_gradsync_gathers"


def cross_replica_gather(row: tf.Tensor, groups: Sequence[Sequence[int]]) -> tf.Tensor:
    """The rows of all cores of a group of a TPU program, on each of them.

    TensorFlow has no all-gather for TPUs: each core sends its row to each other by ``AllToAll``,
    which is the same number of bytes. The operation says by an attribute that it is one.

    Args:
      row: ``[1, elements]``.
      groups: lists of physical core numbers.

    Returns:
      ``[size of a group, elements]``, in the order of the group.
    """
    from tensorflow.python.tpu.ops import tpu_ops

    size = len(groups[0])
    sent = tf.broadcast_to(row, [size, row.shape[1]])
    received = tpu_ops.all_to_all(
        sent,
        concat_dimension=0,
        split_dimension=0,
        split_count=size,
        group_assignment=[list(group) for group in groups],
    )
    set_attr(received.op, GATHERS, tf.AttrValue(b=True))
    return received


def with_own_types(value: np.ndarray) -> np.ndarray:
    """The same bytes in a type that TensorFlow takes; 2.12 has a bfloat16 of its own.

    Read on TensorFlow 2.12 to 2.21.
    """
    own = tf.bfloat16.as_numpy_dtype
    if value.dtype.name == "bfloat16" and value.dtype != own:
        return value.view(np.uint16).view(own)
    return value


class BridgeError(RuntimeError):
    """TensorFlow's bridge to XLA refuses a program."""


def function_hlo(function: Any, input_specs: Sequence[tf.TensorSpec]) -> bytes:
    """What TensorFlow's bridge to XLA makes of a function, before any optimization.

    Read on TensorFlow 2.12 to 2.21: what ``experimental_get_compiler_ir`` of a ``tf.function``
    calls. It needs eager execution.

    Args:
      function: a concrete function.
      input_specs: of its arguments, without what it captures.

    Returns:
      A serialized ``HloModuleProto``. Its results are the function's, then the new values of the
      variables that the function assigns; the module's aliases say which is whose.

    Raises:
      BridgeError: when XLA has no kernel for an operation.
    """
    from tensorflow.python.eager.polymorphic_function import compiler_ir

    generate = compiler_ir.from_concrete_function(function, list(input_specs))
    try:
        return generate(stage="hlo_serialized")
    except (tf.errors.OpError, ValueError) as error:
        text = str(error).split("The op is created at", 1)[0].split("Stack trace", 1)[0]
        raise BridgeError(" ".join(text.split())[:600]) from error


def hlo_module(serialized: bytes) -> Any:
    """Reads a program of XLA.

    Read on TensorFlow 2.12 to 2.21. Later versions know more fields; what a version does not know
    it keeps as unknown fields.

    Args:
      serialized: a serialized ``HloModuleProto``; empty for a module to fill.

    Returns:
      The ``HloModuleProto``.

    Raises:
      google.protobuf.message.DecodeError: when it is something else.
    """
    from tensorflow.compiler.xla.service import hlo_pb2

    return hlo_pb2.HloModuleProto.FromString(serialized)


def xla_element_types() -> dict[str, int]:
    """Name of each element type of XLA, as in "F32" -> its number in an ``HloModuleProto``.

    Read on TensorFlow 2.12 to 2.21.
    """
    from tensorflow.compiler.xla import xla_data_pb2

    return dict(xla_data_pb2.PrimitiveType.items())


# Optimizers of tf.compat.v1.

# What each of them was made with, by the attribute that holds it.
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
    """What an optimizer of ``tf.compat.v1.train`` was made with.

    Read on TensorFlow 2.12 to 2.21.

    Args:
      optimizer: of one of the seven classes itself, not of a class of a user's.
      call: whether functions are called; else they are in the result.

    Returns:
      Values (numbers, tensors, names or None) by the names of arguments.
    """
    attributes = _HYPERPARAMETERS[type(optimizer).__name__]
    found = {name: getattr(optimizer, attribute) for name, attribute in attributes.items()}
    return {name: value() if call and callable(value) else value for name, value in found.items()}


def optimizers_inside(optimizer: Any) -> list[Any]:
    """An optimizer of ``tf.compat.v1`` and those that it hands gradients on to, outermost first.

    Read on TensorFlow 2.12 to 2.21: wrappers keep the one inside as ``_opt`` or ``_optimizer``.
    """
    found: list[Any] = []
    while optimizer is not None and optimizer not in found:
        found.append(optimizer)
        optimizer = getattr(optimizer, "_opt", None) or getattr(optimizer, "_optimizer", None)
    return found


def create_slots(optimizer: tf.train.Optimizer, variables: Sequence[Any]) -> None:
    """Makes the slots of an optimizer, which it makes else when gradients are applied first.

    Read on TensorFlow 2.12 to 2.21.

    Args:
      optimizer: of ``tf.compat.v1.train``; one that hands gradients on to another has no own.
      variables: what it is going to update.
    """
    for inside in optimizers_inside(optimizer):
        with tf.init_scope():
            inside._create_slots(variables)


def number_of_tpu_shards() -> int | None:
    """How many shards the TPU program has that is being built; None outside of any.

    Read on TensorFlow 2.12 to 2.21.
    """
    from tensorflow.python.tpu import tpu_function

    return tpu_function.get_tpu_context().number_of_shards


# Sessions and summaries.


def session_interface() -> type:
    """The class that savers and hooks take sessions for.

    Read on TensorFlow 2.12 to 2.21.
    """
    from tensorflow.python.client import session

    return session.SessionInterface


def summary_writers(graph: tf.Graph) -> list[tf.Operation]:
    """The operations that open a graph's writers of version 2 summaries; input 0 is the writer.

    Read on TensorFlow 2.12 to 2.21: ``summary_ops_v2`` keeps them in a collection.
    """
    return graph.get_collection("_SUMMARY_WRITER_V2")


def add_saving_listeners(hook: tf.train.CheckpointSaverHook, listeners: Sequence[Any]) -> None:
    """Adds listeners to a hook that saves checkpoints.

    Read on TensorFlow 2.12 to 2.21; Estimator adds them in the same way.
    """
    hook._listeners.extend(listeners)
