"""Quantized blocks: whole numbers with one scale for each block."""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

import numpy as np

from mtf_gradsync._private.libraries import tf

SCALE_BYTES = 2  # bfloat16
# A block whose largest number is smaller is sent as zeros, so that its scale, the scale's inverse
# and the quantization error stay well inside float32's range.
SMALLEST = 2.0**-100


class Blocks(NamedTuple):
    """A quantization: numbers are sent in blocks of `size`, as whole numbers of 8 or 4 bits."""

    bits: int
    size: int

    @property
    def bytes(self) -> int:
        """Bytes of a block, with its scale."""
        return self.size * self.bits // 8 + SCALE_BYTES

    @property
    def largest(self) -> int:
        """The largest whole number that is sent."""
        return 2 ** (self.bits - 1) - 1

    def count(self, size: int) -> int:
        """The number of blocks for some number of numbers."""
        return -(-size // self.size)

    def pay(self, size: int) -> bool:
        """Whether some number of numbers takes at most half of the bytes of float32."""
        return 2 * self.count(size) * self.bytes <= 4 * size


def encode(x: tf.Tensor, blocks: Blocks) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Quantizes blocks of numbers, float32 ``[..., numbers of a block]``.

    Returns the numbers, int8 ``[..., bytes of a block's numbers]``, the scales, bfloat16
    ``[..., 1]``, and the quantization error: x minus its `decode`d value, which is exact in float32
    on every device, as a scale has only 8 bits. A block with a number that is not finite has the
    scale NaN and the error 0.
    """
    finite = tf.reduce_all(tf.math.is_finite(x), -1, keepdims=True)
    top = tf.reduce_max(tf.abs(x), -1, keepdims=True)
    scale = _to_eight_bits(top * np.float32(1 / blocks.largest))
    scale = tf.minimum(scale, _largest_scale(blocks.largest))
    scale = tf.where_v2(tf.logical_and(finite, top >= SMALLEST), scale, 0.0)
    inverse = 1 / tf.where_v2(scale > 0, scale, 1.0)
    rounded = tf.round(tf.where_v2(finite, x, 0.0) * inverse)
    rounded = tf.clip_by_value(rounded, -blocks.largest, blocks.largest)
    rounded = tf.where_v2(scale > 0, rounded, 0.0)
    left = tf.where_v2(finite, x - rounded * scale, 0.0)
    scales = tf.cast(tf.where_v2(finite, scale, math.nan), tf.bfloat16)
    return tf.cast(_packed(rounded, blocks.bits), tf.int8), scales, left


def decode(numbers: tf.Tensor, scales: tf.Tensor, blocks: Blocks) -> tf.Tensor:
    """Returns the float32 numbers of blocks that `encode` made."""
    return _unpacked(tf.cast(numbers, tf.float32), blocks.bits) * tf.cast(scales, tf.float32)


def in_blocks(values: Sequence[tf.Tensor], blocks: Blocks, parts: int) -> tf.Tensor:
    """Arranges tensors of one dtype in ``[parts, blocks of a part, numbers of a block]``.

    Each tensor begins a block; the rest of its last one, and of the last part, is zeros.
    """
    pieces, count = [], 0
    for x in values:
        size = x.shape.num_elements()
        own = blocks.count(size)
        pieces.append(tf.pad(tf.reshape(x, [-1]), [[0, own * blocks.size - size]]))
        count += own
    rows = rows_of_part(count, parts)
    filling = (rows * parts - count) * blocks.size
    if filling:
        pieces.append(tf.zeros([filling], pieces[0].dtype))
    return tf.reshape(tf.concat(pieces, 0), [parts, rows, blocks.size])


def out_of_blocks(
    x: tf.Tensor, shapes: Sequence[Sequence[int]], blocks: Blocks
) -> tuple[tf.Tensor, ...]:
    """Returns the tensors of given shapes that `in_blocks` arranged."""
    flat, start, values = tf.reshape(x, [-1]), 0, []
    for shape in shapes:
        size = math.prod(shape)
        values.append(tf.reshape(flat[start : start + size], shape))
        start += blocks.count(size) * blocks.size
    return tuple(values)


def rows_of_part(count: int, parts: int) -> int:
    """Returns the number of blocks in each of some equal parts."""
    return -(-count // parts)


def _to_eight_bits(x: tf.Tensor) -> tf.Tensor:
    """Rounds positive float32 to the 8 significant bits of bfloat16."""
    # By its bits, as XLA removes a cast to bfloat16 and back.
    bits = tf.bitcast(x, tf.int32) + 0x8000
    return tf.bitcast(tf.bitwise.bitwise_and(bits, -0x10000), tf.float32)


def _largest_scale(largest: int) -> np.float32:
    """Returns the largest 8-bit scale whose product with the largest whole number is finite."""
    mantissa, exponent = math.frexp(float(np.finfo(np.float32).max) / largest)
    return np.float32(math.ldexp(math.floor(mantissa * 2**8), exponent - 8))


def _packed(rounded: tf.Tensor, bits: int) -> tf.Tensor:
    """Stores whole numbers as int8, two of 4 bits in one."""
    if bits == 8:
        return rounded
    shape = rounded.shape.as_list()
    low, high = tf.unstack(tf.reshape(rounded, [*shape[:-1], shape[-1] // 2, 2]), axis=-1)
    return (low + 8) + 16 * (high + 8) - 128


def _unpacked(numbers: tf.Tensor, bits: int) -> tf.Tensor:
    if bits == 8:
        return numbers
    both = numbers + 128
    high = tf.floor(both / 16)
    pairs = tf.stack([both - 16 * high - 8, high - 8], axis=-1)
    shape = numbers.shape.as_list()
    return tf.reshape(pairs, [*shape[:-1], 2 * shape[-1]])
