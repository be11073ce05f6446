"""Which tensors cross the mesh together (planning), and how they are put together (packing)."""

from __future__ import annotations

from typing import Sequence

from mtf_gradsync._tf_compat import tf


def plan_buckets(num_bytes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Groups tensors into buckets of at most bucket_bytes.

    Consecutive tensors share a bucket until the next one would not fit any more. A tensor that
    is larger than a bucket stands alone, and the bucket before it stays open.

    Args:
      num_bytes: size of each tensor in bytes, 0 or more.
      bucket_bytes: largest size of a bucket that holds more than one tensor; 0 keeps every
        tensor alone.

    Returns:
      Lists of indices into num_bytes; each index stands in one of them, in rising order.
    """
    buckets: list[list[int]] = []
    room = -1
    open_bucket: list[int] = []
    for index, size in enumerate(num_bytes):
        if size > bucket_bytes or bucket_bytes == 0:
            buckets.append([index])
        elif open_bucket and size <= room:
            open_bucket.append(index)
            room -= size
        else:
            open_bucket = [index]
            buckets.append(open_bucket)
            room = bucket_bytes - size
    return buckets


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates tensors of one dtype and known shapes into one of rank 1."""
    return tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)


def unpack(packed: tf.Tensor, shapes: Sequence[Sequence[int]]) -> tuple[tf.Tensor, ...]:
    """Splits what `pack` made; shapes are those of the tensors that went in, in order."""
    sizes = [tf.TensorShape(shape).num_elements() for shape in shapes]
    pieces = tf.split(packed, sizes)
    return tuple(tf.reshape(piece, shape) for piece, shape in zip(pieces, shapes))
