"""Two models on two meshes of one graph, each with a wrapper of its own."""

import contextlib

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference

STEPS = 3
# As for CrossShardOptimizer's trajectories.
TOLERANCE = STEPS * 16 * np.finfo(np.float32).eps
MESHES = {"one": ("all:4", "batch:all"), "other": ("rows:2;cols:2", "batch:rows;hidden:cols")}
WRAPPERS = {
    "one": lambda opt, **mesh: gs.GradientAccumulationOptimizer(opt, 1, **mesh),
    "other": lambda opt, **mesh: gs.SyncReplicasOptimizer(opt, 2, **mesh),
}


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_each_trains_as_numpy_does(kind, pairs):
    feeds = models.mlp_batches(STEPS)
    graph = mtf.Graph()
    inputs = {k: tf.placeholder(tf.float32, v.shape) for k, v in feeds[0].items()}
    block = simd.tpu_program(*MESHES["one"]) if kind == "simd" else contextlib.nullcontext()
    operations, impls = [], {}
    with block as program:
        losses = {}
        for name, (shape, layout) in MESHES.items():
            mesh = mtf.Mesh(graph, name)
            impls[mesh] = harness.placement(shape, layout)
            if program is not None:
                impls[mesh] = mtf.simd_mesh_impl.SimdMeshImpl(
                    mtf.convert_to_shape(shape),
                    mtf.convert_to_layout_rules(layout),
                    device_assignment=program.mesh_impl.device_assignment,
                )
            with tf.variable_scope(name):
                losses[name] = models.mlp_loss(mesh, inputs)
                variables = [v for v in graph.trainable_variables if v.mesh is mesh]
                grads = mtf.gradients([losses[name]], [v.value for v in variables])
                optimizer = WRAPPERS[name](
                    models.OPTIMIZERS["sgd"](), mesh_shape=shape, layout=layout
                )
                if pairs:
                    for grad, variable in zip(grads, variables):
                        operations += optimizer.apply_grad(grad, variable)
                else:
                    operations += optimizer.apply_grads(grads, variables)
        lowering = mtf.Lowering(graph, impls)
        done = [lowering.lowered_operation(op) for op in operations]
    values = {v.op.name: v for v in tf.trainable_variables()}
    session = (
        program.session(lowering) if program else tf.Session(config=harness.placement_config(4))
    )
    with session:
        if program is None:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
        for feed in feeds:
            session.run(done, {inputs[k]: v for k, v in feed.items()})
        if program is None:
            session.run(lowering.copy_slices_to_masters())
            found = session.run(values)
        else:
            found = session.variables()
    for key, value in reference.train("sgd", feeds).items():
        for name in MESHES:
            np.testing.assert_allclose(
                found[f"{name}/{key}"], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=key
            )
