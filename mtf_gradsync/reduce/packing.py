"""Which tensors cross the mesh together (planning), and how they are put together (packing)."""

from __future__ import annotations

from typing import Sequence

from mtf_gradsync._tf_compat import tf


def plan_buckets(num_bytes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Groups tensors into buckets of at most bucket_bytes.

    Each tensor goes into the first bucket that has room for it (first fit). A tensor that is
    larger than a bucket stands alone.

    Args:
      num_bytes: size of each tensor in bytes, 0 or more.
      bucket_bytes: largest size of a bucket that holds more than one tensor; 0 keeps every
        tensor alone.

    Returns:
      Lists of indices into num_bytes; each index stands in one of them, in rising order.
    """
    buckets: list[list[int]] = []
    rooms: list[int] = []
    for index, size in enumerate(num_bytes):
        fitting = None
        if bucket_bytes > 0:
            fitting = next((i for i, room in enumerate(rooms) if size <= room), None)
        if fitting is None:
            buckets.append([index])
            rooms.append(bucket_bytes - size)
        else:
            buckets[fitting].append(index)
            rooms[fitting] -= size
    return buckets


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Puts tensors of one dtype and known shapes into one tensor.

    Tensors of one shape are stacked, which takes a single operation; others are made flat and
    concatenated.
    """
    if _one_shape([t.shape.as_list() for t in tensors]):
        return tf.stack(tensors)
    flat = tf.constant([-1])
    return tf.concat([t if t.shape.rank == 1 else tf.reshape(t, flat) for t in tensors], 0)


def unpack(packed: tf.Tensor, shapes: Sequence[Sequence[int]]) -> tuple[tf.Tensor, ...]:
    """Takes apart what `pack` made; shapes are those of the tensors that went in, in order."""
    if _one_shape(shapes):
        return tuple(tf.unstack(packed, len(shapes)))
    pieces = tf.split(packed, [tf.TensorShape(shape).num_elements() for shape in shapes])
    # Few shapes, many tensors: each shape is one constant.
    constants = {tuple(s): tf.constant(list(s), tf.int32) for s in shapes if len(s) != 1}
    return tuple(
        piece if len(shape) == 1 else tf.reshape(piece, constants[tuple(shape)])
        for piece, shape in zip(pieces, shapes)
    )


def _one_shape(shapes: Sequence[Sequence[int]]) -> bool:
    return all(list(shape) == list(shapes[0]) for shape in shapes)
