"""Opens a TPU program by hand, for cores that need not exist.

``tf.tpu.replicate`` takes the model as a function, but a Mesh-TF user builds the model, the
lowering and the update operations step by step.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Sequence

import numpy as np

from mtf_gradsync._private import tensorflow as private
from mtf_gradsync._private.libraries import tf


def made_up_device_assignment(num_replicas: int) -> Any:
    """Returns a ``DeviceAssignment`` of cores that do not exist, in lexicographic order.

    It has the form of a TPU v2 or v3 slice: two cores on a chip (one if their number is odd), chips
    in a rectangle as square as it can be.
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
    """Returns a tensor of the program, which is another of `tensors` on each core, in order."""
    # The operation belongs outside the program, whose context marks all that is made in it.
    with tf.control_dependencies(None):
        return private.tpu_replicated_input(tensors, name)


@contextlib.contextmanager
def replicated_program(num_replicas: int) -> Iterator[str]:
    """Puts every operation made inside into one TPU program; yields the name of its cluster."""
    graph = tf.get_default_graph()
    cluster = graph.unique_name("cluster")
    pivot = tf.no_op(name=cluster + "/pivot")
    scope = tf.get_variable_scope()
    used_resources = scope.use_resource
    with private.tpu_replicate_context(cluster, num_replicas, pivot):
        metadata = private.tpu_replicate_metadata(num_replicas)
        # A TPU program cannot use reference variables.
        scope.set_use_resource(True)
        try:
            with private.tpu_shard_context(num_replicas), tf.control_dependencies([metadata]):
                yield cluster
        finally:
            scope.set_use_resource(used_resources)
