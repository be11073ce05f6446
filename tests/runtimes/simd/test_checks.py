"""What cannot be emulated is refused, with its name and a way out."""

import numpy as np
import pytest

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import tf
from tests import ordering

REFUSED = simd.UnsupportedProgramError


def test_no_program():
    with pytest.raises(REFUSED, match=r"simd\.tpu_program"):
        simd.emulate(tf.get_default_graph())


def conditional_of_version_2():
    tf.enable_control_flow_v2()
    try:
        one = tf.constant(1.0)
        tf.cond(one > 0, lambda: tf.tpu.cross_replica_sum(one, [[0, 1]]), lambda: one)
    finally:
        tf.disable_control_flow_v2()


def total(x):
    return tf.tpu.cross_replica_sum(x, [[0, 1]])


def sum_of(groups):
    return tf.raw_ops.CrossReplicaSum(input=1.0, group_assignment=tf.constant(groups), name="s")


PARTITION = r"'s' of type CrossReplicaSum .*each of the 2 cores once"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: tf.raw_ops.InfeedDequeue(dtype=tf.float32, shape=[2], name="features"),
            r"'features' of type InfeedDequeue .*per_replica",
        ),
        (
            lambda: tf.raw_ops.OutfeedEnqueueTuple(inputs=[tf.constant(1.0)], name="scalars"),
            r"'scalars' of type OutfeedEnqueueTuple .*fetch",
        ),
        (
            lambda: tf.placeholder(tf.float32, [], name="inside"),
            r"'inside' of type Placeholder .*before the program opens",
        ),
        (
            lambda: tf.function(total)(tf.constant(1.0)),
            r"holds the collective .* of type CrossReplicaSum",
        ),
        (conditional_of_version_2, r"of type (Stateless)?If .*tf.disable_v2_behavior"),
        (lambda: sum_of([[0]]), PARTITION),
        (lambda: sum_of([[0, 0], [1, 1]]), PARTITION),
        (lambda: sum_of([[0, 2]]), PARTITION),
    ],
)
def test_what_cannot_stand_in_a_program(build, message):
    with simd.tpu_program("all:2", "") as program:
        build()
    with pytest.raises(REFUSED, match=message):
        program.session()


def test_function_without_collectives_runs():
    @tf.function
    def double(x):
        return 2 * x

    with simd.tpu_program("all:2", "") as program:
        out = tf.tpu.cross_replica_sum(double(tf.constant(1.0)), [[0, 1]])
    with program.session() as session:
        assert session.run(out) == 4


def test_outside_operation_that_reads_from_inside():
    with simd.tpu_program("all:2", "") as program:
        out = tf.constant(1.0, name="loss")
    tf.identity(out, name="logged")
    with pytest.raises(REFUSED, match=r"'logged' of type Identity .*reads 'loss'.*fetch"):
        program.session()


def test_groups_that_are_not_constant():
    groups = tf.placeholder(tf.int32, [1, 2])
    with simd.tpu_program("all:2", "") as program:
        tf.raw_ops.CrossReplicaSum(input=1.0, group_assignment=groups, name="s")
    version = program.graph.version
    with pytest.raises(REFUSED, match=r"'s' .*not a constant"):
        program.session()
    assert program.graph.version == version  # nothing was added before it was checked


def test_collective_outside_every_program():
    with simd.tpu_program("all:2", "") as program:
        tf.constant(1.0)
    tf.raw_ops.CrossReplicaSum(input=1.0, group_assignment=tf.constant([[0, 1]]), name="s")
    with pytest.raises(REFUSED, match=r"'s' .*outside every TPU program"):
        program.session()


PAIRS = [[0, 1], [2, 3]]


def sum_over(groups, x):
    return tf.tpu.cross_replica_sum(x, groups)


def conditional_sum(groups, nested=False):
    """Each core feeds a predicate and a value; the branch sums the values over groups."""
    predicates = [tf.placeholder(tf.bool, []) for _ in range(4)]
    with simd.tpu_program("all:4", "") as program:
        mine = program.per_replica(predicates)
        core = tf.cast(program.mesh_impl.pnum_tensor, tf.float32)

        def branch():
            if nested:
                return tf.cond(core < 2, lambda: sum_over(groups, core), lambda: core)
            return sum_over(groups, core)

        out = tf.cond(mine, branch, lambda: core * 100, name="choose")
    return program, out, lambda *values: dict(zip(predicates, values))


def test_all_cores_take_one_branch():
    program, out, feed = conditional_sum([[0, 1, 2, 3]])
    with program.session() as session:
        assert session.run(out, feed(True, True, True, True), True) == [6, 6, 6, 6]
        assert session.run(out, feed(False, False, False, False), True) == [0, 100, 200, 300]


def test_groups_may_branch_differently():
    program, out, feed = conditional_sum(PAIRS)
    with program.session() as session:
        assert session.run(out, feed(True, True, False, False), True) == [1, 1, 200, 300]
        assert session.run(out, feed(False, False, True, True), True) == [0, 100, 5, 5]


def test_divergence_inside_a_group_says_who_and_about_what():
    program, out, feed = conditional_sum(PAIRS)
    with program.session() as session:
        with pytest.raises(simd.BranchDivergenceError) as caught:
            session.run(out, feed(True, True, True, False))
        # The session goes on.
        assert session.run(out, feed(True, True, True, True), True) == [1, 1, 5, 5]
    error = caught.value
    assert error.values == {2: True, 3: False}
    assert error.predicate == "choose/pred_id"
    assert len(error.collectives) == 1
    for part in ("[2, 3]", "conditional", "'choose/pred_id'", "True on cores [2]"):
        assert part in str(error)


def test_inner_conditional_is_compared_too():
    # Cores 0 and 1 sum, 2 and 3 do not: fine for pairs, not for 0 with 2.
    program, out, feed = conditional_sum(PAIRS, nested=True)
    with program.session() as session:
        assert session.run(out, feed(True, True, True, True), True) == [1, 1, 2, 3]
        with pytest.raises(simd.BranchDivergenceError, match=r"'choose/pred_id'.*cores \[1\]"):
            session.run(out, feed(True, False, True, True))
    with tf.Graph().as_default():
        program, out, feed = conditional_sum([[0, 2], [1, 3]], nested=True)
        with program.session() as session, pytest.raises(
            simd.BranchDivergenceError, match="choose/cond/pred_id"
        ):
            session.run(out, feed(True, True, True, True))


def test_branch_without_collectives_needs_no_agreement():
    predicates = [tf.placeholder(tf.bool, []) for _ in range(2)]
    with simd.tpu_program("all:2", "") as program:
        mine = program.per_replica(predicates)
        out = sum_over([[0, 1]], tf.cond(mine, lambda: 1.0, lambda: 10.0))
    with program.session() as session:
        assert session.run(out, dict(zip(predicates, [True, False])), True) == [11, 11]


def loop(groups, turns):
    """Doubles a value in a loop, summing over groups on every turn."""
    return tf.while_loop(
        lambda i, _: i < turns, lambda i, v: (i + 1, sum_over(groups, v)), [0, 1.0]
    )[1]


def test_loop_with_collectives():
    with simd.tpu_program("all:4", "") as program:
        out = loop(PAIRS, 3)
    with program.session() as session:
        assert session.run(out, per_replica=True) == [8] * 4


def test_loop_turns_have_to_agree_within_a_group():
    turns = [tf.placeholder(tf.int32, []) for _ in range(4)]
    with simd.tpu_program("all:4", "") as program:
        out = loop(PAIRS, program.per_replica(turns))
    with program.session() as session:
        assert session.run(out, dict(zip(turns, [1, 1, 4, 4])), True) == [2, 2, 16, 16]
        with pytest.raises(simd.BranchDivergenceError, match="while loop") as caught:
            session.run(out, dict(zip(turns, [1, 2, 3, 3])))
    assert caught.value.values == {0: False, 1: True}


def test_loops_without_collectives_turn_as_often_as_each_core_wants():
    turns = [tf.placeholder(tf.int32, []) for _ in range(4)]
    with simd.tpu_program("all:4", "") as program:
        mine = program.per_replica(turns)
        outer = tf.while_loop(
            lambda i, _: i < 2,
            lambda i, v: (
                i + 1,
                sum_over(
                    [[0, 1, 2, 3]],
                    tf.while_loop(lambda j, _: j < mine, lambda j, w: (j + 1, w + 1.0), [0, v])[1],
                ),
            ),
            [0, 0.0],
        )[1]
    with program.session() as session:
        # First turn: 0 + 1 + 2 + 3 = 6, second: 4 * 6 + 6.
        assert session.run(outer, dict(zip(turns, range(4))), True) == [30] * 4


def test_permutation_needs_only_the_cores_it_connects():
    predicates = [tf.placeholder(tf.bool, []) for _ in range(4)]
    with simd.tpu_program("all:4", "") as program:
        mine = program.per_replica(predicates)
        core = tf.cast(program.mesh_impl.pnum_tensor, tf.float32) + 1
        out = tf.cond(
            mine,
            lambda: tf.raw_ops.CollectivePermute(
                input=core, source_target_pairs=tf.constant([[0, 1], [1, 0]])
            ),
            lambda: core,
        )
    with program.session() as session:
        run = lambda *p: session.run(out, dict(zip(predicates, p)), True)  # noqa: E731
        np.testing.assert_array_equal(run(True, True, False, True), [2, 1, 3, 0])
        with pytest.raises(simd.BranchDivergenceError, match=r"\[0, 1\]"):
            run(True, False, True, True)


def test_conditional_inside_a_loop_is_compared_on_every_turn():
    feeds = [tf.placeholder(tf.int32, []) for _ in range(4)]
    with simd.tpu_program("all:4", "") as program:
        switch_at = program.per_replica(feeds)

        def turn(i, v):
            return i + 1, tf.cond(i >= switch_at, lambda: sum_over(PAIRS, v), lambda: v + 1)

        out = tf.while_loop(lambda i, _: i < 4, turn, [0, 1.0])[1]
    with program.session() as session:
        # One addition and three doublings; three additions and one doubling.
        assert session.run(out, dict(zip(feeds, [1, 1, 3, 3])), True) == [16, 16, 8, 8]
        with pytest.raises(simd.BranchDivergenceError, match="conditional") as caught:
            session.run(out, dict(zip(feeds, [1, 1, 3, 2])))
    assert caught.value.values == {2: False, 3: True}


def test_loop_inside_a_conditional():
    feeds = [tf.placeholder(tf.bool, []) for _ in range(4)]
    with simd.tpu_program("all:4", "") as program:
        out = tf.cond(program.per_replica(feeds), lambda: loop(PAIRS, 3), lambda: 0.5)
    with program.session() as session:
        assert session.run(out, dict(zip(feeds, [True, True, False, False])), True) == [
            8,
            8,
            0.5,
            0.5,
        ]
        with pytest.raises(simd.BranchDivergenceError, match="conditional"):
            session.run(out, dict(zip(feeds, [True, True, False, True])))


def counting(kind):
    """A variable that all cores share, read, written and read again where each core may go."""
    counter = tf.get_variable("counter", [], initializer=tf.zeros_initializer())
    predicates = [tf.placeholder(tf.bool, []) for _ in range(4)]
    with simd.tpu_program("all:4", "") as program:
        mine = program.per_replica(predicates)

        def count():
            before = counter.read_value()
            with tf.control_dependencies([counter.assign(before + 1.0)]):
                return before + 10.0 * counter.read_value()

        if kind == "conditional":
            out = tf.cond(mine, count, lambda: -1.0)
        else:
            turns = tf.where(mine, 3, 1)
            out = tf.while_loop(lambda i, _: i < turns, lambda i, v: (i + 1, v + count()), [0, 0.0])
            out = out[1]
    return program, out, lambda *values: dict(zip(predicates, values))


@pytest.mark.parametrize(("kind", "after"), [("conditional", [10.0, 21.0]), ("while loop", [63.0])])
def test_writes_of_a_shared_variable_come_between_the_reads_of_all_cores(kind, after):
    program, out, feed = counting(kind)
    assert not ordering.races_on_replicas(program)
    with program.session() as session:
        for value in after:
            assert session.run(out, feed(True, True, True, True), True) == [value] * 4


@pytest.mark.parametrize("kind", ["conditional", "while loop"])
def test_cores_that_share_a_variable_have_to_write_together(kind):
    program, out, feed = counting(kind)
    with program.session() as session, pytest.raises(
        simd.BranchDivergenceError, match=rf"Assign.*inside a {kind}.*cores \[1, 2, 3\]"
    ):
        session.run(out, feed(False, True, True, True))
