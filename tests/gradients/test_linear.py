"""Which Python functions of TensorFlow tensors are known to be linear, and in what."""

import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.gradients.flow import linear_arguments

F = tf.float32
ONE = [((2, 3), F)]
TWO = [((2, 3), F), ((2, 3), F)]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x,
        tf.negative,
        lambda x: 2.0 * x - x / 3.0,
        lambda x: tf.cast(tf.cast(x, tf.bfloat16), tf.float64),
        lambda x: tf.reshape(tf.transpose(x), [6]),
        lambda x: tf.reduce_sum(x, 1) + tf.reduce_mean(x, 1),
        lambda x: tf.pad(x[:, 1:], [[0, 0], [1, 0]]),
        lambda x: tf.concat([x, tf.zeros_like(x)], 1),
        lambda x: tf.stack(tf.unstack(x, axis=1)),
        lambda x: tuple(tf.split(x, 3, 1)),
        lambda x: tf.where_v2(tf.constant([True, False, True]), x, tf.zeros_like(x)),
        lambda x: tf.matmul(x, tf.ones([3, 4])),
        lambda x: tf.einsum("ij,jk->ik", x, tf.ones([3, 4])),
        lambda x: tf.gather(x, [1, 0, 1]),
        lambda x: tf.cumsum(x, 1),
        tf.zeros_like,
    ],
)
def test_linear(fn):
    assert linear_arguments(fn, ONE, [0])


@pytest.mark.parametrize(
    "fn",
    [
        tf.square,
        lambda x: x * x,
        lambda x: x + 1.0,
        lambda x: 1.0 / x,
        tf.nn.relu,
        tf.sign,
        tf.is_nan,
        lambda x: tf.cast(x, tf.int32),
        lambda x: tf.where_v2(x > 0, x, tf.zeros_like(x)),
        lambda x: tf.where_v2(tf.constant([True, False, True]), x, tf.ones_like(x)),
        lambda x: (x, tf.exp(x)),
        lambda x: tf.matmul(x, x, transpose_b=True),
        lambda x: tf.reduce_max(x, 1),
        lambda x: tf.cond(tf.constant(True), lambda: x, lambda: x),  # not followed
    ],
)
def test_not_known_to_be_linear(fn):
    assert not linear_arguments(fn, ONE, [0])


@pytest.mark.parametrize(
    ("fn", "first", "second", "both"),
    [
        (tf.multiply, True, True, False),
        (tf.divide, True, False, False),
        (tf.add, False, False, True),
        (tf.subtract, False, False, True),
        (lambda x, y: x * tf.exp(y), True, False, False),
        (lambda x, y: y, False, True, True),
        (lambda x, y: tf.concat([x, y], 0), False, False, True),
    ],
)
def test_in_which_arguments(fn, first, second, both):
    assert linear_arguments(fn, TWO, [0]) is first
    assert linear_arguments(fn, TWO, [1]) is second
    assert linear_arguments(fn, TWO, [0, 1]) is both


def test_tensors_from_outside_are_factors(fresh_graph):
    scale = tf.placeholder(F, [])
    before = len(fresh_graph.get_operations())
    assert linear_arguments(lambda x: x * scale, ONE, [0])
    assert not linear_arguments(lambda x: x + scale, ONE, [0])
    assert len(fresh_graph.get_operations()) == before


def test_functions_that_cannot_run_alone_are_not_linear():
    def fails(x):
        raise RuntimeError("only on a TPU")

    assert not linear_arguments(fails, ONE, [0])
