"""Programs on XLA devices compute what they say: collectives, loops, branches, numbers."""

import numpy as np
import pytest

from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import tf
from tests.runtimes.xla.programs import Conditional

pytestmark = pytest.mark.xla


def session(program, lowering=None):
    return xla.session(program, lowering, cache_dir=None)


def test_collectives_stay_in_branches_and_loops():
    conditional = Conditional()
    x = np.array([1.0, -2.0, 0.5, 4.0], np.float32)
    total = sum(range(8)) * x
    averaged = [(c // 2 * 2 + 0.5) * x for c in range(8)]  # the mean of a pair of cores
    steps = 4
    with session(conditional.program) as devices:
        for step in range(steps):
            updated, average = devices.run(
                conditional.fetches, {conditional.x: x}, per_replica=True
            )
            np.testing.assert_array_equal(updated, [total.sum() * (step % 2)] * 8)
            np.testing.assert_array_equal(average, averaged)
        variables = devices.variables()
    np.testing.assert_array_equal(variables["total"], total * (steps // 2))
    assert variables["count"] == steps


def test_nested_branches_and_loops():
    x = tf.placeholder(tf.float32, [])
    with tf.variable_scope("", use_resource=True):
        zeros = tf.zeros_initializer()
        count, visits = (tf.get_variable(n, [], initializer=zeros) for n in ("count", "visits"))
    with simd.tpu_program("all:2", "batch:all") as program:
        positive = tf.greater(x, 0.0)

        def turn(i, a):
            def even():
                with tf.control_dependencies([visits.assign_add(1.0)]):
                    return tf.tpu.cross_replica_sum(a, [[0, 1]])

            return i + 1, tf.cond(tf.equal(i % 2, 0), even, lambda: a + 1.0)

        def loop():
            return tf.while_loop(lambda i, a: i < 4, turn, [tf.constant(0), x])[1]

        first = tf.cond(positive, loop, lambda: -x)
        # Shares its predicate with the first, and waits for it.
        second = tf.cond(positive, lambda: first + 0.5, lambda: first)
        with tf.control_dependencies([second.op]):
            count.assign_add(second)
    with session(program) as devices:
        # (3 + 3 + 1) doubled, and 1
        assert devices.run([first, second], {x: 3.0}, per_replica=True) == [[15, 15], [15.5, 15.5]]
        assert devices.run([first, second], {x: -2.0}, per_replica=True) == [[2, 2], [2, 2]]
        assert devices.variables() == {"count": 17.5, "visits": 2.0}


def test_a_loop_in_a_loop_whose_counter_nothing_reads_afterwards():
    x = tf.placeholder(tf.float32, [])
    with simd.tpu_program("all:2", "batch:all") as program:

        def turn(i, a):
            return i + 1, tf.while_loop(lambda j, b: j < 3, lambda j, b: (j + 1, b + b), [0, a])[1]

        y = tf.while_loop(lambda i, a: i < 2, turn, [0, x])[1]
    with session(program) as devices:
        assert devices.run(y, {x: 1.0}) == 2.0**6


VALUES = {
    tf.int64: 2**40 + 1,
    tf.int32: -(2**30),
    tf.bfloat16: 1.5,
    tf.float16: 0.25,
    tf.float64: 1 + 2.0**-40,
}


@pytest.mark.parametrize(
    ("kind", "value", "collective"),
    [
        pytest.param(kind, value, collective, id=f"{kind.name} {collective}")
        for kind, value in VALUES.items()
        for collective in ("none", "sum", "all_to_all", "permute")
        # TensorFlow sums no 64-bit integers on a TPU.
        if (kind, collective) != (tf.int64, "sum")
    ],
)
def test_every_dtype_goes_in_across_and_out(kind, value, collective):
    """In as input and variable, across by each collective, out as fetch and variable."""
    numpy_kind = kind.as_numpy_dtype
    given = np.array([value, 2 * value], numpy_kind)
    x = tf.placeholder(kind, [2])
    with tf.variable_scope("", use_resource=True):
        v = tf.get_variable("v", [2], kind, initializer=tf.constant_initializer(0, kind))
    with simd.tpu_program("all:2", "") as program:
        sent = {
            "none": lambda: x,
            "sum": lambda: tf.tpu.cross_replica_sum(x, [[0], [1]]),
            "all_to_all": lambda: tf.raw_ops.AllToAll(
                input=x,
                group_assignment=[[0, 1]],
                concat_dimension=0,
                split_dimension=0,
                split_count=2,
            ),
            "permute": lambda: tf.raw_ops.CollectivePermute(
                input=x, source_target_pairs=[[0, 1], [1, 0]]
            ),
        }[collective]()
        with tf.control_dependencies([v.assign_add(sent)]):
            got = tf.identity(sent)
    expected = {"all_to_all": [given[[0, 0]], given[[1, 1]]]}.get(collective, [given, given])
    with session(program) as devices:
        received = devices.run(got, {x: given}, per_replica=True)
        assert received[0].dtype == numpy_kind
        np.testing.assert_array_equal(received, expected)
        np.testing.assert_array_equal(devices.read("v"), expected[0])


@pytest.mark.parametrize(("split", "concat"), [(0, 1), (1, 0), (1, 2), (2, 2)])
def test_all_to_all_along_other_dimensions(split, concat):
    shape, cores = [4, 4, 4], 4
    parts = [tf.constant(np.arange(64).reshape(shape) + 100.0 * c, tf.float32) for c in range(4)]
    groups = [[0, 2], [3, 1]]
    with simd.tpu_program("all:4", "") as program:
        y = tf.raw_ops.AllToAll(
            input=program.per_replica(parts),
            group_assignment=groups,
            concat_dimension=concat,
            split_dimension=split,
            split_count=2,
        )
    values = [np.arange(64.0).reshape(shape) + 100 * c for c in range(cores)]
    expected = [None] * cores
    for group in groups:
        for place, core in enumerate(group):
            pieces = [np.split(values[other], 2, split)[place] for other in group]
            expected[core] = np.concatenate(pieces, concat)
    with session(program) as devices:
        np.testing.assert_array_equal(devices.run(y, per_replica=True), expected)


def test_permutations_with_holes_give_zeros():
    parts = [tf.constant(float(1 << c)) for c in range(4)]
    with simd.tpu_program("all:4", "") as program:
        x = program.per_replica(parts)
        moved = tf.raw_ops.CollectivePermute(input=x, source_target_pairs=[[0, 3], [3, 1]])
    with session(program) as devices:
        assert devices.run(moved, per_replica=True) == [0, 8, 0, 1]


def test_an_operation_without_kernel_is_refused_by_name_before_anything_runs():
    x = tf.placeholder(tf.float32, [4])
    with tf.variable_scope("", use_resource=True):
        v = tf.get_variable("v", [], initializer=tf.zeros_initializer())
    with simd.tpu_program("all:2", "") as program:
        y = tf.strings.to_number(tf.strings.as_string(x)) + v.assign_add(1.0)
    with session(program) as devices:
        with pytest.raises(simd.UnsupportedProgramError, match="AsString"):
            devices.run(y, {x: np.zeros(4)})
        assert devices.read("v") == 0
