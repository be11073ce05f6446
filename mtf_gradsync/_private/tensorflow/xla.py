"""TensorFlow's bridge to XLA, and operations of XLA."""

from __future__ import annotations

from typing import Any, ContextManager, Sequence

import numpy as np

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow.graphs import set_attr


def eager_mode() -> ContextManager[None]:
    """Switches eager execution on for a while, also where ``disable_v2_behavior`` was called."""
    from tensorflow.python.eager import context

    return context.eager_mode()


def xla_custom_call(
    operand: tf.Tensor, target: str, settings: str, shape: Sequence[int], name: str
) -> tf.Tensor:
    """Returns an operation that TensorFlow's bridge turns into a custom call of XLA.

    `settings` is the call's ``backend_config``. The result has the given shape and the input's
    dtype.
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
    which is the same number of bytes and gets the attribute `GATHERS`.
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


def with_own_types(value: np.ndarray) -> np.ndarray:
    """Returns the same bytes in a type that TensorFlow takes; 2.12 has a bfloat16 of its own."""
    own = tf.bfloat16.as_numpy_dtype
    if value.dtype.name == "bfloat16" and value.dtype != own:
        return value.view(np.uint16).view(own)
    return value


class BridgeError(RuntimeError):
    """TensorFlow's bridge to XLA refuses a program."""


def function_hlo(function: Any, input_specs: Sequence[tf.TensorSpec]) -> bytes:
    """Returns the HLO that TensorFlow's bridge to XLA makes of a concrete function, unoptimized.

    It needs eager execution. `input_specs` are of the function's arguments, without its captures.
    The result is a serialized ``HloModuleProto``, whose results are the function's, then the new
    values of the variables that it assigns; the module's aliases say which is whose.

    Raises:
      BridgeError: XLA has no kernel for an operation.
    """
    from tensorflow.python.eager.polymorphic_function import compiler_ir

    generate = compiler_ir.from_concrete_function(function, list(input_specs))
    try:
        return generate(stage="hlo_serialized")
    except (tf.errors.OpError, ValueError) as error:
        text = str(error).split("The op is created at", 1)[0].split("Stack trace", 1)[0]
        raise BridgeError(" ".join(text.split())[:600]) from error


def profile_space(serialized: bytes) -> Any:
    """Reads a serialized ``XSpace``, a profile as TensorFlow's and jax's profilers write it."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    return xplane_pb2.XSpace.FromString(serialized)


def hlo_module(serialized: bytes) -> Any:
    """Reads a program of XLA, a serialized ``HloModuleProto``; no bytes give a module to fill.

    Fields of later versions stay as unknown fields. Bytes of something else raise
    google.protobuf.message.DecodeError.
    """
    from tensorflow.compiler.xla.service import hlo_pb2

    return hlo_pb2.HloModuleProto.FromString(serialized)


def xla_element_types() -> dict[str, int]:
    """Returns XLA's element types, such as "F32", with their numbers in an ``HloModuleProto``."""
    from tensorflow.compiler.xla import xla_data_pb2

    return dict(xla_data_pb2.PrimitiveType.items())
