"""A branch as one call: what it copies, and where it can be one."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.step.conditional import can_call, run_as_call
from tests import harness
from tests.step.steps import of_type


def takes_calls():
    return can_call(lowering("/device:CPU:0", "/device:CPU:1"))


def lowering(*devices):
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        mtf.zeros(mesh, mtf.Shape([]))
        shape = mtf.Shape([mtf.Dimension("all", len(devices))])
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(shape, mtf.LayoutRules([]), list(devices))
        return mtf.Lowering(mesh.graph, {mesh: impl})


def test_not_over_several_processes():
    assert not can_call(
        lowering("/job:worker/task:0/device:CPU:0", "/job:worker/task:1/device:CPU:0")
    )


def test_not_on_a_simd_mesh():
    with simd.tpu_program("all:2", "") as program:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        mtf.zeros(mesh, mtf.Shape([]))
        assert not can_call(mtf.Lowering(mesh.graph, {mesh: program.mesh_impl}))


def test_handles_and_constants_are_copied_into_the_call(fresh_graph):
    if not takes_calls():
        pytest.skip("this TensorFlow inlines every function")
    variable = tf.get_variable("v", [3], initializer=tf.ones_initializer())
    constant = tf.constant([1.0, 2.0, 3.0])
    fed = tf.placeholder(tf.float32, [3])

    def body():
        return variable.assign_add(constant * fed).op

    call = run_as_call(body)
    # Only what is fed is handed in.
    assert [x.op.type for x in call.inputs] == ["Placeholder"]
    with tf.Session(config=gs.session_config(num_cpu_devices=1)) as session:
        session.run(variable.initializer)
        session.run(call, {fed: np.full(3, 2, "f")})
        np.testing.assert_array_equal(session.run(variable), [3, 5, 7])


def test_skipping_a_call_passes_over_one_operation(fresh_graph):
    if not takes_calls():
        pytest.skip("this TensorFlow inlines every function")

    def build(mesh, inputs):
        del inputs
        w = mtf.get_variable(mesh, "w", mtf.Shape([]), initializer=tf.zeros_initializer())
        opt = gs.GradientAccumulationOptimizer(mtf.optimize.SgdOptimizer(1.0), 2)
        return opt.apply_grads([w * 0.0 + 1.0], [w.operation]), {}

    result = harness.run("placement", "all:2", "", build, [{"x": np.zeros(1, "f")}] * 4)
    assert result.variables["w"] == -4
    calls = of_type(result.graph, "PartitionedCall", "StatefulPartitionedCall")
    assert len(calls) == 1
