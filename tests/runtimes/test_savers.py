"""Checkpoints of other runs, under savers that nobody prepared."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

SIZE = 8


class Program:
    """A weight whose gradient is the input, and an accumulating optimizer, in a graph."""

    def __init__(self, shards, make, add_saver=True):
        with tf.Graph().as_default() as self.graph:
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            batch, d = mtf.Dimension("batch", 4), mtf.Dimension("d", SIZE)
            self.x = tf.placeholder(tf.float32, [4, SIZE])
            w = mtf.get_variable(mesh, "w", [d], initializer=tf.zeros_initializer())
            loss = mtf.reduce_sum(mtf.import_tf_tensor(mesh, self.x, [batch, d]) * w)
            self.step = tf.train.get_or_create_global_step()
            layout = f"all:{shards}", "batch:all"
            inner = mtf.optimize.SgdOptimizer(1.0)
            operations = make(inner, *layout).minimize(loss, self.step)
            lowering = mtf.Lowering(graph, {mesh: harness.placement(*layout)})
            self.update = [lowering.lowered_operation(op) for op in operations]
            self.hook = mtf.MtfRestoreHook(lowering)
            self.to_masters = lowering.copy_slices_to_masters()
            self.values = {v.op.name: v for v in tf.global_variables()}
            self.saver = tf.train.Saver() if add_saver else None

    def run(self, steps, restore=None, save=None, scaffold=None):
        """Makes steps in a monitored session; returns the variables."""
        config = gs.session_config(num_cpu_devices=4)
        with self.graph.as_default():
            creator = tf.train.ChiefSessionCreator(
                scaffold=scaffold, config=config, checkpoint_filename_with_path=restore
            )
            with tf.train.MonitoredSession(creator, [self.hook]) as session:
                for _ in range(steps):
                    session.run(self.update, {self.x: np.ones([4, SIZE], "f")})
                session.run(self.to_masters)
                raw = session.run_step_fn(lambda step_context: step_context.session)
                if save:
                    self.saver.save(raw, save, write_meta_graph=False)
                return raw.run(self.values)


def local(inner, mesh_shape, layout, name="GradientAccumulationOptimizer", **given):
    return gs.GradientAccumulationOptimizer(
        inner, 3, accumulate="local", mesh_shape=mesh_shape, layout=layout, name=name, **given
    )


def renamed(inner, *mesh):
    return local(inner, *mesh, name="another")


def narrow(inner, *mesh):
    return local(inner, *mesh, accumulator_dtype=tf.bfloat16)


@pytest.fixture(scope="module")
def in_mid(tmp_path_factory):
    """A checkpoint of four shards after two of three microbatch steps."""
    path = str(tmp_path_factory.mktemp("in_mid") / "model.ckpt")
    tf.enable_resource_variables()
    Program(4, local).run(2, save=path)
    return path


def test_a_session_s_default_saver_lays_sums_out_anew(in_mid):
    values = Program(2, local, add_saver=False).run(1, restore=in_mid)
    # Three microbatch steps of four examples each.
    np.testing.assert_array_equal(values["w"], np.full(SIZE, -12.0))


def test_a_plain_saver_fails_before_training(in_mid):
    program = Program(2, local)
    scaffold = tf.train.Scaffold(saver=program.saver)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"use gs\.ReshardingSaver"):
        program.run(1, restore=in_mid, scaffold=scaffold)


def test_another_wrapper_s_sums_are_not_taken_up(in_mid):
    values = Program(4, renamed, add_saver=False).run(1, restore=in_mid)
    np.testing.assert_array_equal(values["w/gradient_accumulator"], np.ones([4, SIZE]))
    assert values["another/mini_step"] == 1
    assert values["another/update_step"] == 0  # as many as the wrapper before has made


def test_another_dtype(in_mid):
    values = Program(4, narrow, add_saver=False).run(1, restore=in_mid)
    np.testing.assert_array_equal(values["w"], np.full(SIZE, -12.0))


def test_what_is_no_checkpoint_is_tensorflow_s_to_say(in_mid):
    with Program(4, local, add_saver=False).graph.as_default():
        saver = gs.ReshardingSaver()
        with tf.Session() as session:
            for path, error in ((None, "None"), (in_mid + "-none", "valid checkpoint")):
                with pytest.raises(ValueError, match=error):
                    saver.restore(session, path)


def test_an_xla_session_runs_it_with_control_flow_of_version_2():
    """The check of shapes is then no function that TensorFlow's context has already."""
    shape, layout, _ = harness.MESHES["2"]

    def build(mesh, inputs):
        w = mtf.get_variable(mesh, "w", [], initializer=tf.zeros_initializer())
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([mtf.Dimension("batch", 2)]))
        where = {"mesh_shape": shape, "layout": layout}
        opt = gs.OuterOptimizer(mtf.optimize.SgdOptimizer(1.0), 1, 1.0, 0.0, outer_dims=(), **where)
        return opt.minimize(mtf.reduce_mean(x * w)), {}

    tf.enable_control_flow_v2()
    try:
        found = harness.run("xla", shape, layout, build, [{"x": np.ones(2, "f")}])
    finally:
        tf.disable_control_flow_v2()
    assert found.variables["w"] == -1.0
