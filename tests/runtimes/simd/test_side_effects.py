"""Variables inside programs: order of reads and writes, and nothing missing."""

import pytest

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.simd.graph_facts import CycleError, sorted_by_needs


@pytest.fixture
def step():
    return tf.get_variable("step", [], tf.int32, tf.zeros_initializer(), use_resource=True)


def test_a_write_runs_though_nobody_fetches_it(step):
    with simd.tpu_program("all:2", "") as program:
        out = tf.constant(1.0) + 1
        tf.assign_add(step, 5)
    with program.session() as session:
        session.run(out)
        assert session.read("step") == 5


def test_all_cores_write_a_shared_variable_as_one(step):
    with simd.tpu_program("all:4", "") as program:
        before = step.read_value()
        added = step.assign_add(1, read_value=False)
        after = step.read_value()
    with program.session() as session:
        for i in range(3):
            assert session.run([before, after], per_replica=True) == [[i] * 4, [i + 1] * 4]
        session.run(added)
        assert session.read(step) == 4


def test_reads_and_writes_follow_program_order(step):
    with simd.tpu_program("all:2", "") as program:
        values = []
        for i in range(20):
            values.append(step.read_value())
            step.assign(values[-1] * 0 + i, read_value=False)
            values.append(step.read_value())
    wanted = [v for i in range(20) for v in (i - 1, i)]
    with program.session() as session:
        for first in (0, 19, 19):
            assert session.run(values) == [first] + wanted[1:]


def test_a_write_in_a_branch_happens_before_later_reads(step):
    take = tf.placeholder(tf.bool, [])
    with simd.tpu_program("all:2", "") as program:
        before = step.read_value()

        def write():
            with tf.control_dependencies([step.assign_add(1, read_value=False)]):
                return tf.constant(0.0)

        tf.cond(take, write, lambda: tf.constant(0.0))
        after = step.read_value()
    with program.session() as session:
        assert session.run([before, after], {take: False}) == [0, 0]
        assert session.run([before, after], {take: True}) == [0, 1]
        assert session.run([before, after], {take: True}) == [1, 2]


def test_reads_in_a_loop_happen_between_the_writes_around_it(step):
    with simd.tpu_program("all:2", "") as program:
        step.assign(7, read_value=False)
        out = tf.while_loop(
            lambda i, _: i < 3, lambda i, v: (i + 1, v + step.read_value()), [0, 0]
        )[1]
        step.assign(100, read_value=False)
    with program.session() as session:
        for _ in range(5):
            assert session.run(out) == 21
            assert session.read(step) == 100


def test_writes_in_a_loop(step):
    with simd.tpu_program("all:2", "") as program:

        def turn(i):
            with tf.control_dependencies([step.assign_add(2, read_value=False)]):
                return i + 1

        tf.while_loop(lambda i: i < 3, turn, [0])
        after = step.read_value()
    with program.session() as session:
        assert session.run(after, per_replica=True) == [6, 6]


def test_outside_operations_wait_for_the_whole_program(step):
    with simd.tpu_program("all:2", "") as program:
        out = tf.constant(1.0)
        tf.assign_add(step, 1)
    with tf.control_dependencies([out.op]):
        afterwards = step.read_value()
    with program.session() as session:
        assert session.run(afterwards) == 1
        assert session.run(afterwards) == 2


def test_failed_assertion_stops_the_program():
    value = tf.placeholder(tf.float32, [])
    with simd.tpu_program("all:2", "") as program:
        tf.debugging.Assert(value > 0, ["value has to be positive"])
        out = value + 1
    with program.session() as session:
        assert session.run(out, {value: 1}) == 2
        with pytest.raises(tf.errors.InvalidArgumentError, match="positive"):
            session.run(out, {value: -1})


def test_items_that_need_nothing_stay_in_order():
    assert sorted_by_needs({"c": (), "a": (), "b": ()}) == ["c", "a", "b"]
    assert sorted_by_needs({}) == []


def test_an_item_waits_for_what_it_needs_and_no_longer():
    needs = {"a": ["d"], "b": [], "c": ["a"], "d": ["b"], "e": []}
    assert sorted_by_needs(needs) == ["b", "d", "a", "c", "e"]


def test_items_that_need_each_other_are_named():
    with pytest.raises(CycleError) as caught:
        sorted_by_needs({"a": [], "b": ["a", "d"], "c": ["b"], "d": ["c"], "e": ["d"]})
    assert sorted(caught.value.cycle) == ["b", "c", "d"]
