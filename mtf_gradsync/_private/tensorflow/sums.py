"""TensorFlow's sums, and the devices that compute them."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow.graphs import set_attr

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
