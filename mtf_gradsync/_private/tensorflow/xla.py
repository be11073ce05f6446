"""TensorFlow's bridge to XLA, and operations of XLA."""

from __future__ import annotations

from typing import Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow.graphs import set_attr


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
