"""TPU programs of TensorFlow."""

from __future__ import annotations

import contextlib
import functools
from typing import ContextManager, Iterator, Sequence

from mtf_gradsync._private.libraries import tf

#: The attribute that says which TPU program an operation belongs to. TensorFlow 2.12 to 2.21.
TPU_PROGRAM_ATTR = "_tpu_replicate"
#: The attribute that names the group of sums that an operation is one of.
TOGETHER_ATTR = "_mtf_gradsync_together"


@contextlib.contextmanager
def summed_together() -> Iterator[None]:
    """Marks the sums over cores that are made inside as one group, under a name of its own."""
    graph = tf.get_default_graph()
    name = graph.unique_name("summed_together").encode()
    with graph._attr_scope({TOGETHER_ATTR: tf.AttrValue(s=name)}):
        yield


@contextlib.contextmanager
def tpu_replicate_context(name: str, num_replicas: int, pivot: tf.Operation) -> Iterator[None]:
    """Marks the operations made inside as part of a TPU program, which begins at `pivot`."""
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
    """Returns the operation that says how many cores run the TPU program around it."""
    from tensorflow.python.tpu.ops import tpu_ops

    return tpu_ops.tpu_replicate_metadata(num_replicas=num_replicas)


def tpu_shard_context(num_replicas: int) -> ContextManager[None]:
    """Tells functions called inside, such as ``tf.tpu.cross_replica_sum``, the number of cores."""
    from tensorflow.python.tpu import tpu_function

    return tpu_function.tpu_shard_context(num_replicas)


def tpu_replicated_input(tensors: Sequence[tf.Tensor], name: str) -> tf.Tensor:
    """Returns one tensor of a TPU program from each core's own, which have one dtype and shape."""
    from tensorflow.python.tpu.ops import tpu_ops

    return tpu_ops.tpu_replicated_input(list(tensors), name=name)


# TensorFlow looks through thousands of kernels for each answer.
@functools.lru_cache(maxsize=None)
def kernel_devices(op_type: str) -> frozenset[str]:
    """Returns kinds of devices, such as "CPU", that TensorFlow can run a type of operation on.

    "DEFAULT" stands for all devices.
    """
    from tensorflow.python.framework import kernels

    return frozenset(k.device_type for k in kernels.get_registered_kernels_for_op(op_type).kernel)
