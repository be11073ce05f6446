"""The parts of TensorFlow that open a TPU program by hand, and where each version keeps them.

``tf.tpu.replicate`` takes the model as a function. A Mesh-TF user builds the model, the lowering
and the update operations step by step, so the program is opened and closed here instead: the same
control flow context, the same metadata operation, the same variable rules.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Sequence

import numpy as np
from tensorflow.python.tpu import tpu as _tpu
from tensorflow.python.tpu import tpu_function as _tpu_function
from tensorflow.python.tpu.ops import tpu_ops as _tpu_ops

from mtf_gradsync._private.libraries import tf

# The attribute that marks an operation as part of a TPU program (all TensorFlow versions).
CLUSTER_ATTR = "_tpu_replicate"


def _replicate_context_class() -> Any:
    """The class that marks operations: in ``tpu.tpu`` on 2.12, in ``tpu.tpu_replication`` since."""
    if hasattr(_tpu, "TPUReplicateContext"):
        return _tpu.TPUReplicateContext
    from tensorflow.python.tpu import tpu_replication

    return tpu_replication.TPUReplicateContext


def made_up_device_assignment(num_replicas: int) -> Any:
    """A ``DeviceAssignment`` for cores that do not exist.

    It has the form of a TPU v2 or v3 slice: two cores on a chip, chips in a rectangle as square as
    it can be ([2, 2, 1, 2] for 8 cores). An odd number of cores gets one core on a chip.

    Args:
      num_replicas: how many cores.

    Returns:
      A ``tf.tpu.experimental.DeviceAssignment`` with cores in lexicographic order.
    """
    cores = 2 if num_replicas % 2 == 0 else 1
    chips = num_replicas // cores
    width = next(w for w in range(int(chips**0.5), 0, -1) if chips % w == 0)
    shape = [width, chips // width, 1, cores]
    coordinates = np.stack(np.unravel_index(np.arange(num_replicas), shape), 1).astype(np.int32)
    topology = tf.tpu.experimental.Topology(
        mesh_shape=shape, device_coordinates=coordinates[np.newaxis]
    )
    return tf.tpu.experimental.DeviceAssignment(topology, coordinates[:, np.newaxis, :])


def replicated_input(tensors: Sequence[Any], name: str) -> tf.Tensor:
    """One tensor of the program that has another value on every core.

    Args:
      tensors: one tensor per core, all of one dtype and shape.
      name: name of the operation.

    Returns:
      The tensor as the program sees it.
    """
    # The operation has to stand outside the program, whose context marks all that is made in it.
    with tf.control_dependencies(None):
        return _tpu_ops.tpu_replicated_input(list(tensors), name=name)


@contextlib.contextmanager
def replicated_program(num_replicas: int) -> Iterator[str]:
    """Marks every operation made inside as part of one TPU program on ``num_replicas`` cores.

    Args:
      num_replicas: how many cores.

    Yields:
      The name of the program (TensorFlow calls it a cluster).
    """
    graph = tf.get_default_graph()
    cluster = graph.unique_name("cluster")
    pivot = tf.no_op(name=cluster + "/pivot")
    context = _replicate_context_class()(name=cluster, num_replicas=num_replicas, pivot=pivot)
    scope = tf.get_variable_scope()
    used_resources = scope.use_resource
    context.Enter()
    try:
        metadata = _tpu_ops.tpu_replicate_metadata(num_replicas=num_replicas)
        # A TPU program cannot use reference variables.
        scope.set_use_resource(True)
        with _tpu_function.tpu_shard_context(num_replicas), tf.control_dependencies([metadata]):
            yield cluster
    finally:
        scope.set_use_resource(used_resources)
        context.Exit()


def cpu_kernels_missing(op_types: Sequence[str]) -> list[str]:
    """Which operation types cannot run on a CPU.

    Args:
      op_types: names of operation types, without those of a graph's own functions.

    Returns:
      The ones for which TensorFlow registered no CPU kernel, in the order given.
    """
    from tensorflow.python.framework import kernels

    missing = []
    for op_type in op_types:
        devices = {k.device_type for k in kernels.get_registered_kernels_for_op(op_type).kernel}
        if not devices & {"CPU", "DEFAULT"}:
            missing.append(op_type)
    return missing
