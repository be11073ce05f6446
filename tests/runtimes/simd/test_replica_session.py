"""Fetches, feeds, variables and checkpoints of sessions on a SIMD program."""

import numpy as np
import pytest

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness
from tests.runtimes.simd.programs import MESHES, SGD, Regression

pytestmark = pytest.mark.usefixtures("runtime")

RATE = 2.0**-4


@pytest.fixture
def program():
    """A program that adds a fed value to a mesh variable."""
    value = tf.placeholder(tf.float32, [], name="value")
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    dim = mtf.Dimension("x", 4)
    with simd.tpu_program("all:2", "x:all") as program:
        w = mtf.get_variable(mesh, "w", [dim], initializer=tf.zeros_initializer())
        update = mtf.assign_add(w.operation, mtf.import_tf_tensor(mesh, value, []) + w * 0)
        program.lowering = mtf.Lowering(graph, {mesh: program.mesh_impl})
        program.update = program.lowering.lowered_operation(update)
        program.inner = value + 1
    program.variable = graph.all_variables[0]
    return program


def test_fetches_by_tensor_operation_and_name_in_any_structure(program):
    with program.session(program.lowering) as session:
        feed = {"value:0": 2}
        out = session.run({"a": [program.inner], "b": (program.update, "value:0")}, feed)
        assert out == {"a": [3], "b": (None, 2)}
        assert session.run(program.inner, feed, per_replica=True) == [3, 3]
        assert session.run([], feed) == []


def test_any_tensor_of_the_program_runs_all_of_it(program):
    with program.session(program.lowering) as session:
        session.run(program.inner, {"value:0": 2})
        np.testing.assert_array_equal(session.read("w"), [2, 2, 2, 2])
        session.run("value:0", {"value:0": 2})  # outside: does not run the program
        np.testing.assert_array_equal(session.read("w"), [2, 2, 2, 2])


def test_reads_variables_by_name_and_object(program):
    with program.session(program.lowering) as session:
        session.run(program.update, {"value:0": 1})
        for key in ("w", program.variable, tf.global_variables()[0]):
            np.testing.assert_array_equal(session.read(key), [1, 1, 1, 1])
        with pytest.raises(ValueError, match=r"no global variable 'v'.*: variable w"):
            session.read("v")


def test_wrong_fetches_and_feeds_say_why(program):
    with program.session(program.lowering) as session:
        late = tf.constant(1.0)
        with pytest.raises(ValueError, match="cannot be fed: it is inside"):
            session.run(program.update, {program.inner: 1})
        with pytest.raises(ValueError, match="no tensor or operation of the program's graph"):
            session.run("nothing:0")
        with pytest.raises(ValueError, match="after the whole graph is built"):
            session.run(late)
    with tf.Graph().as_default(), program.session(program.lowering) as session:
        with pytest.raises(ValueError, match="no tensor or operation of the program's graph"):
            session.run(tf.constant(1.0))


def test_what_stands_in_a_loop_is_not_fetched():
    inside_loop = []
    with simd.tpu_program("all:2", "") as program:

        def body(i):
            inside_loop.append(i + 1)
            return inside_loop[0]

        tf.while_loop(lambda i: i < 3, body, [0])
    with program.session() as session:
        with pytest.raises(ValueError, match="inside a loop or conditional"):
            session.run(inside_loop[0])


def test_sessions_do_not_share_variables(program):
    with program.session(program.lowering) as one, program.session(program.lowering) as other:
        one.run(program.update, {"value:0": 1})
        assert one.read("w")[0] == 1
        assert other.read("w")[0] == 0


def test_user_graph_keeps_what_was_built(program):
    names = {op.name for op in program.graph.get_operations()}
    with program.session(program.lowering):
        pass
    assert names <= {op.name for op in program.graph.get_operations()}
    version = program.graph.version
    with program.session(program.lowering):  # prepared once
        pass
    assert program.graph.version == version


def test_checkpoint_goes_on_as_if_never_stopped(tmp_path):
    model = Regression(lambda: mtf.optimize.AdamWeightDecayOptimizer(0.25), steps=4)
    model.placeholders()
    with simd.tpu_program(*MESHES["4x2"]) as program:
        lowering, loss, updates = model.build(program.mesh_impl)
    with program.session(lowering) as session:
        whole = model.steps_in(session, [loss, updates])
        variables = session.variables()
    with program.session(lowering) as session:
        model.x, model.y, x, y = model.x[:2], model.y[:2], model.x[2:], model.y[2:]
        model.steps_in(session, updates)
        path = session.save(str(tmp_path / "model"))
    with program.session(lowering) as session:
        session.restore(path)
        model.x, model.y = x, y
        assert model.steps_in(session, [loss, updates]) == whole[2:]
        for name, value in session.variables().items():
            np.testing.assert_array_equal(value, variables[name], err_msg=name)


def test_checkpoints_cross_between_emulated_cores_and_one_processor(tmp_path):
    model = Regression(lambda: SGD(RATE), steps=1)
    model.placeholders()
    with simd.tpu_program(*MESHES["2x2x2"]) as program:
        lowering, _, updates = model.build(program.mesh_impl)
    with program.session(lowering) as session:
        model.steps_in(session, updates)
        path = session.save(str(tmp_path / "cores"))
        w = session.read("w")
    with tf.Graph().as_default():
        model.placeholders()
        model.build(harness.placement(*harness.ONE))
        saver = tf.train.Saver()
        with tf.Session() as session:
            saver.restore(session, path)
            np.testing.assert_array_equal(session.run(tf.global_variables()[0]), w)
            session.run(tf.assign(tf.global_variables()[0], w + 1))
            path = saver.save(session, str(tmp_path / "one"))
    with program.session(lowering) as session:
        session.restore(path)
        np.testing.assert_array_equal(session.read("w"), w + 1)


def test_nothing_to_save(tmp_path):
    with simd.tpu_program("all:2", "") as program:
        tf.constant(1.0)
    with program.session() as session, pytest.raises(ValueError, match="no variables to save"):
        session.save(str(tmp_path / "model"))
