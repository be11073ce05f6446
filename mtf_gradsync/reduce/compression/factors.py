"""Matrices and their low-rank factors."""

from __future__ import annotations

import math
from typing import Sequence

import numpy as np

from mtf_gradsync._private.libraries import tf

_PHILOX = 1
# A column counts as spanned by those before it if less than this share of its length remains.
_ROUNDING = 2.0**-22
# A matrix whose largest number is smaller counts as zeros.
_SMALLEST = 2.0**-100


def split_of(shape: Sequence[int]) -> int:
    """Returns how many leading dimensions to make rows, for about as many columns as rows."""

    def factors(number: int) -> int:
        return math.prod(shape[:number]) + math.prod(shape[number:])

    return min(range(len(shape) + 1), key=factors)


def random_factors(
    columns: Sequence[int], rank: int, step: tf.Tensor | int
) -> tuple[tf.Tensor, ...]:
    """Makes a random matrix `[columns, rank]` for each number of columns; each step has its own.

    The matrices of a step are the same on all processors and in every run.
    """
    raw, made = tf.raw_ops, []
    count = tf.cast(tf.reshape(step, [1]), tf.uint64)
    for number, size in enumerate(columns):
        counter = tf.concat([tf.constant([number], tf.uint64), count], 0)
        made.append(
            raw.StatelessRandomNormalV2(
                shape=[size, rank], key=tf.constant([0], tf.uint64), counter=counter, alg=_PHILOX
            )
        )
    return tuple(made)


def without_dead_columns(factor: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Replaces columns of a factor that are zero by those of another one."""
    dead = tf.reduce_all(tf.equal(factor, 0.0), 0, keepdims=True)
    return tf.where_v2(dead, other, factor)


def orthonormal(matrices: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """Makes the columns of float32 ``[rows, rank]`` matrices orthonormal: Gram-Schmidt, twice.

    A column that is spanned by those before it, up to rounding, becomes zeros. A matrix with a
    number that is not finite becomes NaN.
    """
    result: list[tf.Tensor] = [matrices[0]] * len(matrices)
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, x in enumerate(matrices):
        alike.setdefault(tuple(x.shape.as_list()), []).append(index)
    for members in alike.values():
        stacked = _orthonormal(tf.stack([matrices[i] for i in members]))
        for index, x in zip(members, tf.unstack(stacked, len(members))):
            result[index] = x
    return tuple(result)


def _orthonormal(x: tf.Tensor) -> tf.Tensor:
    """`orthonormal` of `[matrices, rows, rank]`."""
    finite = tf.reduce_all(tf.math.is_finite(x), [1, 2], keepdims=True)
    top = tf.reduce_max(tf.abs(x), [1, 2], keepdims=True)
    # Scaled, as squares of huge or tiny numbers are beyond float32.
    x = x / tf.where_v2(tf.logical_and(finite, top >= _SMALLEST), top, 1.0)
    made: list[tf.Tensor] = []
    for column in tf.unstack(x, axis=2):
        length = _length(column)
        for _ in range(2):
            # Sums in place of matmul, which TPUs round to bfloat16.
            column -= sum(b * tf.reduce_sum(b * column, 1, keepdims=True) for b in made)
        left = _length(column)
        dead = left <= _ROUNDING * length
        made.append(tf.where_v2(dead, 0.0, column / tf.where_v2(dead, 1.0, left)))
    return tf.where_v2(finite, tf.stack(made, 2), np.float32(np.nan))


def _length(column: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(tf.reduce_sum(tf.square(column), 1, keepdims=True))
