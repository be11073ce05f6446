"""What belongs to a mesh is refused by the counterparts without one, which say what takes it."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

MAKE = {
    "CrossShardOptimizer": lambda opt: gs.CrossShardOptimizer(opt),
    "GradientAccumulationOptimizer": lambda opt: gs.GradientAccumulationOptimizer(opt, 2),
    "SyncReplicasOptimizer": lambda opt: gs.SyncReplicasOptimizer(opt, 2),
}
CALLS = {
    "minimize": lambda opt, loss, grad, w: opt.minimize(loss),
    "compute_gradients": lambda opt, loss, grad, w: opt.compute_gradients(loss),
    "var_list": lambda opt, loss, grad, w: opt.minimize(w.graph, var_list=[w]),
    "apply_gradients": lambda opt, loss, grad, w: opt.apply_gradients([(grad, w)]),
}


@pytest.fixture
def model():
    """A loss, its gradient by the one variable, and the variable."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    dim = mtf.Dimension("inputs", 4)
    w = mtf.get_variable(mesh, "w", [dim], initializer=tf.ones_initializer())
    loss = mtf.reduce_mean(mtf.square(w))
    (grad,) = mtf.gradients([loss], [w])
    return loss, grad, mesh.graph.trainable_variables[0]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", MAKE)
def test_they_name_the_mesh_optimizer_and_build_nothing(kind, call, model):
    optimizer = MAKE[kind](tf.train.AdamOptimizer(0.1))
    words = rf"gs\.{kind} .*gs\.MeshOptimizer\(AdamOptimizer\(\.\.\."
    with harness.unchanged(), pytest.raises(TypeError, match=words):
        CALLS[call](optimizer, *model)


@pytest.mark.parametrize("kind", MAKE)
def test_they_have_no_apply_grads_and_say_why(kind):
    optimizer = MAKE[kind](tf.train.AdamOptimizer(0.1))
    assert not hasattr(optimizer, "apply_grads")
    with pytest.raises(AttributeError, match="MeshOptimizer"):
        optimizer.apply_grads([], [])


@pytest.mark.parametrize("kind", MAKE)
def test_nested_ones_name_the_innermost_optimizer(kind, model):
    if kind == "SyncReplicasOptimizer":
        optimizer = MAKE[kind](gs.CrossShardOptimizer(tf.train.MomentumOptimizer(0.1, 0.9)))
    else:
        optimizer = gs.CrossShardOptimizer(MAKE[kind](tf.train.MomentumOptimizer(0.1, 0.9)))
    with pytest.raises(TypeError, match=r"gs.MeshOptimizer\(MomentumOptimizer\(\.\.\."):
        optimizer.minimize(model[0])


GIVEN = {
    "clip_by_norm": lambda x: tf.clip_by_norm(x, 1.0),
    "clip_by_global_norm": lambda x: tf.clip_by_global_norm([x], 1.0),
    "add": lambda x: tf.add(x, 1.0),
    "a list": lambda x: tf.add_n([x, x]),
    "a plain optimizer": lambda x: tf.train.AdamOptimizer(0.1).minimize(mtf.reduce_sum(x)),
}


@pytest.mark.parametrize("given", GIVEN)
def test_operations_of_tensorflow_say_what_would_do(given, model):
    with pytest.raises(TypeError, match=r"clip_by_global_norm.*gs\.MeshOptimizer\(optimizer\)"):
        GIVEN[given](model[1])


def test_a_variable_of_a_mesh_is_refused_like_a_tensor(model):
    with pytest.raises(TypeError, match="belongs to Mesh-TensorFlow"):
        tf.reduce_sum(model[2])


def test_what_works_on_mesh_tensors_works_as_before(model):
    """Mesh-TF's operators take tf tensors from either side, which TensorFlow tries first."""
    _, _, w = model
    two = tf.constant(2.0)
    results = [two * w.value, w.value * two, two + w.value, two - w.value, two / w.value]
    assert all(isinstance(result, mtf.Tensor) for result in results)
    assert not tf.is_tensor(w.value)
    mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", [""])
    lowering = mtf.Lowering(w.graph, {w.mesh: mesh_impl})
    with tf.Session() as session:
        session.run([tf.global_variables_initializer()])
        session.run(lowering.copy_masters_to_slices())
        values = session.run([lowering.export_to_tf_tensor(result) for result in results])
    np.testing.assert_array_equal(np.stack(values)[:, 0], [2, 2, 3, 1, 2])
