"""Cutting one core's program out of a graph: what comes in, what runs, what is refused."""

import pytest

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.xla.replica_program import replica_program


def four_cores():
    return simd.tpu_program("all:4", "batch:all")


def types(replica):
    return [node.op for node in replica.graph_def.node]


def test_inputs_are_tensors_then_variables():
    x = tf.placeholder(tf.float32, [2, 3], name="x")
    v = tf.get_variable("v", [3], use_resource=True)
    parts = [tf.constant(float(i), name=f"part_{i}") for i in range(4)]
    with four_cores() as program:
        mine = program.per_replica(parts)
        with tf.control_dependencies([v.assign_add(tf.reduce_sum(x, 0) * mine)]):
            loss = tf.identity(v.read_value())
    replica = replica_program(program, [loss])
    assert [(i.dtype, i.shape, i.is_variable) for i in replica.inputs] == [
        ("float32", (2, 3), False),
        ("float32", (), False),
        ("float32", (3,), True),
    ]
    assert [i.sources for i in replica.inputs] == [
        ("x:0",) * 4,
        ("part_0:0", "part_1:0", "part_2:0", "part_3:0"),
        ("v",) * 4,
    ]
    assert replica.num_replicas == 4
    assert types(replica).count("AssignAddVariableOp") == 1


def test_updates_belong_to_the_program_without_being_fetched():
    v = tf.get_variable("v", [3], use_resource=True)
    with four_cores() as program:
        total = tf.tpu.cross_replica_sum(tf.ones([3]), [[0, 1], [2, 3]])
        v.assign_add(total)
        tf.cos(total, name="nobody_needs_this")
    replica = replica_program(program)
    assert {"AssignAddVariableOp", "CrossReplicaSum"} <= set(types(replica))
    assert not {"Cos", "TPUReplicateMetadata"} & set(types(replica))


def test_reads_and_writes_stay_in_program_order():
    v = tf.get_variable("v", [], use_resource=True)
    with four_cores() as program:
        before = v.read_value()
        v.assign_add(1.0)
    replica = replica_program(program, [before])
    (write,) = [n for n in replica.graph_def.node if n.op == "AssignAddVariableOp"]
    (read,) = [n for n in replica.graph_def.node if n.op == "ReadVariableOp"]
    assert "^" + read.name in write.input


def test_two_conditionals_of_one_predicate_stay_apart():
    p = tf.placeholder(tf.bool, [])
    with four_cores() as program:
        first = tf.cond(p, lambda: tf.ones([]), lambda: tf.zeros([]))
        second = tf.cond(p, lambda: first + 1.0, lambda: first)
    replica = replica_program(program, [second])
    pivots = [n for n in replica.graph_def.node if n.name.endswith("pred_id")]
    assert len(pivots) == 2


def test_a_fetch_outside_the_program_is_refused():
    x = tf.placeholder(tf.float32, [2], name="x")
    with four_cores() as program:
        tf.identity(x)
    with pytest.raises(ValueError, match="'x:0' cannot be fetched: it stands outside"):
        replica_program(program, [x])


def test_a_fetch_in_a_branch_is_refused():
    inner = []
    with four_cores() as program:

        def yes():
            inner.append(tf.ones([]) * 2.0)
            return inner[0]

        tf.cond(tf.constant(True), yes, lambda: tf.zeros([]))
    with pytest.raises(ValueError, match="inside a loop or conditional"):
        replica_program(program, inner)


def test_an_operation_as_fetch_is_refused_with_the_reason():
    v = tf.get_variable("v", [], use_resource=True)
    with four_cores() as program:
        update = v.assign_add(1.0, read_value=False)
    with pytest.raises(ValueError, match="Updates need not be fetched"):
        replica_program(program, [update])


def test_inputs_need_static_shapes():
    x = tf.placeholder(tf.float32, [None, 3], name="x")
    with four_cores() as program:
        y = tf.reduce_sum(x)
    with pytest.raises(simd.UnsupportedProgramError, match=r"'x' of shape \(\?, 3\)"):
        replica_program(program, [y])


def test_strings_from_outside_are_refused():
    x = tf.placeholder(tf.string, [2], name="x")
    with four_cores() as program:
        y = tf.equal(x, "a")
    with pytest.raises(simd.UnsupportedProgramError, match="'x' of dtype string"):
        replica_program(program, [y])
