"""Programs in which a loop turns once more, to estimate what its turns cost."""

import pytest
import tensorflow.compat.v1 as tf

from mtf_gradsync import simd
from mtf_gradsync.runtimes._private.jax import stablehlo_to_hlo
from mtf_gradsync.runtimes.xla.topology.compiling import lower
from mtf_gradsync.runtimes.xla.topology.estimate import with_one_more_iteration

pytestmark = pytest.mark.xla


def loop(*, first=2, less=tf.less, end=9, turn=lambda i: i + 2, inner=None):
    """A program with a loop of four turns, whose body squares; `inner` turns of a loop add."""

    def square(i, y):
        squared = y * y
        if inner is None:
            return turn(i), squared
        # Nothing reads what counts its turns when they are over.
        return turn(i), tf.while_loop(
            lambda j, z: j < inner, lambda j, z: (j + 1, z + z), [0, squared]
        )[1]

    with tf.Graph().as_default():
        n = tf.placeholder(tf.int32, [])
        x = tf.placeholder(tf.float32, [4])
        with simd.tpu_program("all:2", "") as program:
            first = n if first is None else tf.constant(first)
            _, y = tf.while_loop(lambda i, y: less(i, end), square, [first, x])
        return lower(program, [y]).module


def counts(module):
    """How many bodies of loops, or calls of them, and loops a program's main function has."""
    stablehlo_to_hlo(module)  # it is one
    main = module[module.index("@main") :]
    return main.count("stablehlo.multiply") + main.count("call @while_body"), main.count(WHILE)


WHILE = "stablehlo.while"


def test_a_turn_stands_before_the_loop():
    one = loop()
    (more,), unknown = with_one_more_iteration(one)
    # 2, 4, 6, 8: four turns, of which one is counted.
    assert (more.times, unknown) == (3, 0)
    assert (counts(one), counts(more.module)) == ((1, 1), (2, 1))


def test_loops_in_loops_turn_as_often_as_both():
    nested = loop(inner=3)
    (outer, inner), unknown = with_one_more_iteration(nested)
    # What an inner turn has more is in 4 * 3 turns, 4 of which are in the outer ones.
    assert (outer.times, inner.times, unknown) == (3, 4 * 3 - 4, 0)
    assert [counts(m)[1] for m in (nested, outer.module, inner.module)] == [2, 3, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"first": None},
        {"less": tf.not_equal, "end": 10},
        {"turn": lambda i: i * 2},
        {"end": -9, "less": tf.greater, "turn": lambda i: i - 2},
        {"turn": lambda i: i - 2},
    ],
    ids=["begins", "compares", "multiplies", "counts down", "does not end"],
)
def test_turns_that_the_program_does_not_say_are_not_known(changes):
    assert with_one_more_iteration(loop(**changes)) == ([], 1)
    assert with_one_more_iteration(loop(**changes, inner=3)) == ([], 2)


def test_one_turn_none_and_no_loop_need_no_other_program():
    assert with_one_more_iteration(loop(end=4)) == ([], 0)
    # The compiler removes a loop that never turns, and those in it.
    assert with_one_more_iteration(loop(end=2, inner=3)) == ([], 0)
    assert with_one_more_iteration("module @step {}") == ([], 0)
