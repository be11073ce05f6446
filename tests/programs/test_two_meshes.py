"""Two models on two meshes of one graph, each with a wrapper of its own."""

import collections
import contextlib

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference

STEPS, HALF = 3, models.BATCH // 2
# As for CrossShardOptimizer's trajectories.
TOLERANCE = STEPS * 16 * np.finfo(np.float32).eps
MESHES = {"one": ("all:4", "batch:all"), "other": ("rows:2;cols:2", "batch:rows;hidden:cols")}
WRAPPERS = {
    "one": lambda opt, **mesh: gs.GradientAccumulationOptimizer(
        opt, 1, should_skip_update_fn=gs.skip_not_finite, **mesh
    ),
    "other": lambda opt, **mesh: gs.SyncReplicasOptimizer(opt, 1, **mesh),
}


def expected(feeds):
    """Variables of both; the step after the first has a NaN in the last quarter of the batch."""
    first = {k: v[:HALF] for k, v in feeds[1].items()}
    return {
        "one": reference.train("sgd", [feeds[0], *feeds[2:]]),
        "other": reference.train("sgd", [feeds[0], first, *feeds[2:]]),
    }


def counted(program, lowering):
    """Of each mesh the groups of sums that reach variables and are not of flags, in bytes."""
    groups = collections.Counter()
    for row in simd.list_collectives(program, lowering=lowering).rows:
        if row.operation == "CrossReplicaSum" and row.variables and row.together:
            groups[row.name.partition("/")[0], row.together] += row.bytes_per_core
    return sorted((mesh, size) for (mesh, _), size in groups.items() if size > 40)


@pytest.mark.parametrize(
    ("kind", "pairs"),
    [
        ("placement", False),
        ("simd", True),
        pytest.param("xla", False, marks=pytest.mark.xla),
    ],
)
def test_each_trains_as_numpy_does(kind, pairs):
    feeds = models.mlp_batches(STEPS)
    given = [{k: v.copy() for k, v in feed.items()} for feed in feeds]
    given[1]["y"][-1] = np.nan
    graph = mtf.Graph()
    inputs = {k: tf.placeholder(tf.float32, v.shape) for k, v in feeds[0].items()}
    is_simd = kind != "placement"
    block = simd.tpu_program(*MESHES["one"]) if is_simd else contextlib.nullcontext()
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
    if is_simd:
        # w1 [6, 8], b1 [8], and a scalar, of which "other" splits 8 in two.
        assert counted(program, lowering) == [("one", 4 * 57), ("other", 4 * 29)]
    found, again = (trained(kind, program, lowering, done, inputs, given) for _ in range(2))
    for mesh, variables in expected(feeds).items():
        for key, value in variables.items():
            np.testing.assert_allclose(
                found[f"{mesh}/{key}"], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=key
            )
    assert all(np.array_equal(value, again[key]) for key, value in found.items())


def trained(kind, program, lowering, done, inputs, feeds):
    """The variables after a session of a step for each feed."""
    if kind == "xla":
        session = xla.session(program, lowering, cache_dir=None)
    elif program is not None:
        session = program.session(lowering)
    else:
        session = tf.Session(config=harness.placement_config(4))
    with session:
        if program is None:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
        for feed in feeds:
            session.run(done, {inputs[k]: v for k, v in feed.items()})
        if program is not None:
            return session.variables()
        session.run(lowering.copy_slices_to_masters())
        return session.run({v.op.name: v for v in tf.trainable_variables()})
