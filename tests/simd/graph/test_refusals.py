"""What cannot be emulated is refused, with its name and a way out."""

import pytest

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import tf

REFUSED = simd.UnsupportedProgramError


def test_no_program():
    with pytest.raises(REFUSED, match=r"simd\.tpu_program"):
        simd.emulate(tf.get_default_graph())


def test_infeed():
    with simd.tpu_program("all:2", "") as program:
        tf.raw_ops.InfeedDequeue(dtype=tf.float32, shape=[2], name="features")
    with pytest.raises(REFUSED, match=r"'features' of type InfeedDequeue .*per_replica"):
        program.session()


def test_outfeed():
    with simd.tpu_program("all:2", "") as program:
        tf.raw_ops.OutfeedEnqueueTuple(inputs=[tf.constant(1.0)], name="scalars")
    with pytest.raises(REFUSED, match=r"'scalars' of type OutfeedEnqueueTuple .*fetch"):
        program.session()


def test_placeholder_inside():
    with simd.tpu_program("all:2", "") as program:
        tf.placeholder(tf.float32, [], name="inside")
    with pytest.raises(REFUSED, match=r"'inside' of type Placeholder .*before the program opens"):
        program.session()


def test_collective_in_a_function():
    @tf.function
    def total(x):
        return tf.tpu.cross_replica_sum(x, [[0, 1]])

    with simd.tpu_program("all:2", "") as program:
        total(tf.constant(1.0))
    with pytest.raises(REFUSED, match=r"holds the collective .* of type CrossReplicaSum"):
        program.session()


def test_collective_in_control_flow_version_2():
    with simd.tpu_program("all:2", "") as program:
        one = tf.constant(1.0)
        tf.enable_control_flow_v2()
        try:
            tf.cond(one > 0, lambda: tf.tpu.cross_replica_sum(one, [[0, 1]]), lambda: one)
        finally:
            tf.disable_control_flow_v2()
    with pytest.raises(REFUSED, match=r"of type (Stateless)?If .*tf.disable_v2_behavior"):
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


@pytest.mark.parametrize("groups", [[[0, 1]], [[0, 0], [1, 2]], [[0, 1], [2, 4]]])
def test_groups_that_are_no_partition(groups):
    with simd.tpu_program("all:4", "") as program:
        tf.raw_ops.CrossReplicaSum(input=1.0, group_assignment=tf.constant(groups), name="s")
    with pytest.raises(REFUSED, match=r"'s' of type CrossReplicaSum .*each of the 4 cores once"):
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
