"""Parts of TensorFlow without a public name that runtimes use, one function each.

All functions of this module were checked with TensorFlow 2.12 to 2.21. ``tests/private`` has a test
of each function, which fails if a version of TensorFlow changes the meaning of a part that the
function uses.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
from typing import Any, ContextManager, Iterator, Sequence

import numpy as np
from tensorflow.python.training import training_util

from mtf_gradsync.extension import advance_step_after, tf

#: The attribute that says which TPU program an operation belongs to. TensorFlow 2.12 to 2.21.
TPU_PROGRAM_ATTR = "_tpu_replicate"


def session_interface() -> type:
    """Returns the class from which sessions must inherit, so that savers and hooks accept them."""
    from tensorflow.python.client import session

    return session.SessionInterface


# TensorFlow looks through thousands of kernels for each answer.
@functools.lru_cache(maxsize=None)
def kernel_devices(op_type: str) -> frozenset[str]:
    """Returns the kinds of devices, such as "CPU", for which TensorFlow has a kernel of `op_type`.

    In the result, "DEFAULT" stands for all kinds of devices.
    """
    from tensorflow.python.framework import kernels

    return frozenset(k.device_type for k in kernels.get_registered_kernels_for_op(op_type).kernel)


def bind_to_loopback(port: int) -> None:
    """Makes a server's port reachable from this machine only; raises OSError if it cannot.

    TensorFlow's servers listen on all addresses of a machine ("0.0.0.0"), and no setting changes
    this. Connections that were made before the call are closed. Call this function after the
    server's constructor, in which the server begins to listen, and before the server is started. A
    server that is not started executes no request.
    """
    if not hasattr(socket, "SO_BINDTODEVICE"):
        raise OSError(f"A system like {sys.platform} cannot bind a socket to a device")
    bound = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket, or closed meanwhile
            continue
        with one:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.getsockname()[1] != port:
                continue
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                # Unlike an address, this can be set on a listening socket, without privileges.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
                bound += 1
            else:
                with contextlib.suppress(OSError):  # not connected
                    one.shutdown(socket.SHUT_RDWR)
    if not bound:
        raise OSError(f"No socket of this process listens on port {port}")


@contextlib.contextmanager
def tpu_replicate_context(name: str, num_replicas: int, pivot: tf.Operation) -> Iterator[None]:
    """Marks operations made in the block as part of the TPU program `name` on `num_replicas` cores.

    `pivot` is an operation on which all operations of the TPU program depend.
    """
    from tensorflow.python.tpu import tpu as home

    if not hasattr(home, "TPUReplicateContext"):  # from 2.13 on
        from tensorflow.python.tpu import tpu_replication as home

    context = home.TPUReplicateContext(name=name, num_replicas=num_replicas, pivot=pivot)
    context.Enter()
    try:
        yield
    finally:
        context.Exit()


def tpu_replicate_metadata(num_replicas: int) -> tf.Operation:
    """Returns an operation that says that `num_replicas` cores run the TPU program around it."""
    from tensorflow.python.tpu.ops import tpu_ops

    return tpu_ops.tpu_replicate_metadata(num_replicas=num_replicas)


def tpu_shard_context(num_replicas: int) -> ContextManager[None]:
    """Returns a context manager in which ``tf.tpu.cross_replica_sum`` sums over `num_replicas`."""
    from tensorflow.python.tpu import tpu_function

    return tpu_function.tpu_shard_context(num_replicas)


def tpu_replicated_input(tensors: Sequence[tf.Tensor], name: str) -> tf.Tensor:
    """Returns a tensor of a TPU program whose value on core i is `tensors[i]`.

    All tensors in `tensors` must have the same dtype and the same shape. `name` is the name of the
    operation.
    """
    from tensorflow.python.tpu.ops import tpu_ops

    return tpu_ops.tpu_replicated_input(list(tensors), name=name)


def eager_mode() -> ContextManager[None]:
    """Returns a context manager for eager execution, even after ``disable_v2_behavior``."""
    from tensorflow.python.eager import context

    return context.eager_mode()


def xla_custom_call(
    operand: tf.Tensor, target: str, settings: str, shape: Sequence[int], name: str
) -> tf.Tensor:
    """Returns an operation that TensorFlow's bridge turns into a custom call of XLA.

    `target` is the name of the custom call, `settings` is the call's ``backend_config``, and `name`
    is the name of the operation. The result has the given shape and the dtype of `operand`.
    """
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    (result,) = gen_xla_ops.xla_custom_call_v2(
        operands=[operand],
        call_target_name=target,
        backend_config=settings,
        has_side_effect=False,
        result_dtypes=[operand.dtype],
        result_shapes=[tf.TensorShape(shape)],
        name=name,
    )
    return result


def as_tensorflow_bfloat16(value: np.ndarray) -> np.ndarray:
    """Returns the array `value`, with TensorFlow's bfloat16 if it has another library's bfloat16.

    The bytes stay the same. TensorFlow 2.12 has a bfloat16 type of its own, which is not the type
    of other libraries. Arrays of other types than bfloat16 are returned as they are.
    """
    own = tf.bfloat16.as_numpy_dtype
    if value.dtype.name == "bfloat16" and value.dtype != own:
        return value.view(np.uint16).view(own)
    return value


class BridgeError(RuntimeError):
    """The error of a program that TensorFlow's bridge to XLA refuses."""


def function_hlo(function: Any, input_specs: Sequence[tf.TensorSpec]) -> bytes:
    """Returns the unoptimized HLO that TensorFlow's bridge to XLA makes of a concrete function.

    Call this function with eager execution enabled. `input_specs` describe the arguments of the
    concrete function, without its captures. The result is a serialized ``HloModuleProto``. The
    module's program returns first the results of the concrete function, then the new values of the
    variables that the concrete function assigns. The module's aliases say which result belongs to
    which variable.

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
    """Returns the message of a serialized ``HloModuleProto``; an empty message for b"".

    Fields that later versions of XLA have added are kept as unknown fields. Raises
    google.protobuf.message.DecodeError if the bytes are no ``HloModuleProto``.
    """
    from tensorflow.compiler.xla.service import hlo_pb2

    return hlo_pb2.HloModuleProto.FromString(serialized)


def xla_element_types() -> dict[str, int]:
    """Returns XLA's element types, such as "F32", with their numbers in an ``HloModuleProto``."""
    from tensorflow.compiler.xla import xla_data_pb2

    return dict(xla_data_pb2.PrimitiveType.items())


def advance_step_after_reads(graph: tf.Graph) -> None:
    """Makes increments of the global step wait for all reads of it in the same training step.

    Without this function, it is left to chance whether a hook that reads the global step gets the
    number before the increment or the number after it. A second call makes increments wait, too,
    for reads that were added to the graph after the first call.
    """
    step = tf.train.get_global_step(graph)
    if step is None or not hasattr(step, "handle"):  # a ref variable's reads have no operation
        return
    of_hooks = training_util._get_or_create_global_step_read(graph).op
    reads = [op for op in step.handle.consumers() if op.type == "ReadVariableOp"]
    advance_step_after(step, [*reads, of_hooks])


def variables_of_saver(saver: tf.train.Saver) -> set[str] | None:
    """Returns the names of the variables that a saver was given to save.

    The result is None if the saver was given no variables: such a saver saves all variables of its
    graph, or was made from a SaverDef.
    """
    given = saver._var_list
    if given is None:
        return None
    variables = given.values() if isinstance(given, dict) else given
    return {v.op.name for v in variables if hasattr(v, "op")}


def initializer_of(variable: tf.Variable) -> tuple[Any, Any]:
    """Returns the operation that initializes a variable, and its initial value."""
    return variable.initializer, variable._initial_value


def set_initializer(variable: tf.Variable, initializer: tuple[Any, Any]) -> None:
    """Sets a variable's initializer and initial value.

    `initializer` is a pair (operation that initializes the variable, initial value), as from
    `initializer_of`.
    """
    variable._initializer_op, variable._initial_value = initializer
