"""Packs tensors into one, and unpacks it."""

from __future__ import annotations

from typing import Sequence

from mtf_gradsync._private.libraries import tf


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns tensors of one dtype as one: stacked if of one shape, else flattened and joined."""
    if _one_shape([t.shape.as_list() for t in tensors]):
        return tf.stack(tensors)
    flat = tf.constant([-1])
    return tf.concat([t if t.shape.rank == 1 else tf.reshape(t, flat) for t in tensors], 0)


def unpack(packed: tf.Tensor, shapes: Sequence[Sequence[int]]) -> tuple[tf.Tensor, ...]:
    """Unpacks the tensor that `pack` made of tensors of these shapes."""
    if _one_shape(shapes):
        return tuple(tf.unstack(packed, len(shapes)))
    pieces = tf.split(packed, [tf.TensorShape(shape).num_elements() for shape in shapes])
    # One constant for each shape, as many tensors share few shapes.
    constants = {tuple(s): tf.constant(list(s), tf.int32) for s in shapes if len(s) != 1}
    return tuple(
        piece if len(shape) == 1 else tf.reshape(piece, constants[tuple(shape)])
        for piece, shape in zip(pieces, shapes)
    )


def _one_shape(shapes: Sequence[Sequence[int]]) -> bool:
    return all(list(shape) == list(shapes[0]) for shape in shapes)
