"""Graphs made by TensorFlow's own tpu.replicate, and the rewritten graph itself."""

import numpy as np

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import tf


def replicated(cores=4):
    """tf.tpu.replicate over a function that uses each collective once."""
    inputs = [tf.placeholder(tf.float32, [cores], name=f"in_{i}") for i in range(cores)]
    step = tf.get_variable("step", [], tf.int32, tf.zeros_initializer(), use_resource=True)
    everyone = [list(range(cores))]

    def computation(x):
        total = tf.tpu.cross_replica_sum(x)
        mixed = tf.raw_ops.AllToAll(
            input=x[None],
            group_assignment=tf.constant(everyone),
            concat_dimension=0,
            split_dimension=1,
            split_count=cores,
        )
        ring = [[i, (i + 1) % cores] for i in range(cores - 1)]
        moved = tf.raw_ops.CollectivePermute(input=x, source_target_pairs=tf.constant(ring))
        return total, mixed, moved, step.assign_add(1, read_value=False)

    return inputs, tf.tpu.replicate(computation, [[x] for x in inputs])


def test_tpu_replicate_runs_with_all_its_outputs():
    inputs, outputs = replicated()
    values = np.arange(16.0).reshape(4, 4)
    with simd.session_on(tf.get_default_graph()) as session:
        out = session.run(outputs, dict(zip(inputs, values)))
        assert session.read("step") == 1
    for core in range(4):
        np.testing.assert_array_equal(out[core][0], values.sum(0))
        np.testing.assert_array_equal(out[core][1], values[:, core : core + 1])
        moved = values[core - 1] if core else np.zeros(4)
        np.testing.assert_array_equal(out[core][2], moved)


def test_rewritten_graph_runs_in_any_session():
    inputs, outputs = replicated(cores=2)
    init = tf.global_variables_initializer().name
    emulated = simd.emulate(tf.get_default_graph().as_graph_def())
    ((program, cores),) = emulated.num_replicas.items()
    assert cores == 2
    feeds = {x.name: [1, 2] for x in inputs}
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(emulated.graph_def, name="")
        with tf.Session(graph=graph, config=simd.cpu_config()) as session:
            session.run([init])
            session.run(emulated.done[program], feeds)
            assert session.run("step/Read/ReadVariableOp:0") == 1
            np.testing.assert_array_equal(session.run(outputs[1][0].name, feeds), [2, 4])


def test_nothing_of_the_tpu_is_left():
    replicated()
    with tf.device("/device:GPU:3"):
        tf.constant(1.0)
    graph_def = simd.emulate(tf.get_default_graph()).graph_def
    assert not [n.name for n in graph_def.node if n.device]
    assert not [n.op for n in graph_def.node if n.op.startswith("TPU")]
    assert not [k for n in graph_def.node for k in n.attr if k.startswith(("_tpu", "_xla"))]


def test_the_graph_given_is_not_changed():
    replicated()
    graph_def = tf.get_default_graph().as_graph_def()
    before = graph_def.SerializeToString(deterministic=True)
    simd.emulate(graph_def)
    assert graph_def.SerializeToString(deterministic=True) == before


def test_names_do_not_collide_with_the_users():
    with tf.name_scope("replica_0"):
        tf.constant(1.0, name="x")
    with simd.tpu_program("all:2", "") as program:
        x = tf.constant(2.0, name="x")
    with program.session() as session:
        assert session.run(["replica_0/x:0", x]) == [1, 2]


def test_two_programs_in_one_graph():
    value = tf.placeholder(tf.float32, [])
    with simd.tpu_program("all:2", "") as program:
        first = tf.tpu.cross_replica_sum(value, [[0, 1]])
    with simd.tpu_program("all:4", ""):
        second = tf.tpu.cross_replica_sum(value, [[0, 1, 2, 3]])
    with program.session() as session:
        assert session.run([first, second], {value: 1}, per_replica=True) == [[2] * 2, [4] * 4]
