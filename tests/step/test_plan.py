"""One plan for each graph: nothing is left behind, and nothing depends on the order of things."""

import functools
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.step.plan import Planned, StepPlan
from tests import harness, models
from tests.step.stacks import LAYOUT, MESH, mlp_step, stacked

EPS = np.finfo("f").eps
ROOT = pathlib.Path(__file__).resolve().parents[2]


@functools.lru_cache(maxsize=None)
def one_update(kind):
    def build(mesh, inputs):
        return mlp_step(stacked(["cross_shard"]), mesh, inputs), {}

    return harness.run(kind, MESH, LAYOUT, build, models.mlp_batches(1)).variables


@pytest.mark.slow
def test_the_same_step_built_twice_is_the_same_graph():
    """Also in another process, so that nothing hangs on where objects lie or how strings hash."""
    from tests.step import built_twice  # which imports this module

    # Here strings hash by another seed: by a random one, or by the one that was given.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    command = [sys.executable, "-m", built_twice.__name__]
    env = {**os.environ, "PYTHONHASHSEED": seed}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as other:
        found = built_twice.digests()
        assert len(set(found)) == 3
        assert found == other.stdout.read().splitlines()
    assert other.returncode == 0


@pytest.mark.slow
def test_two_graphs_at_once():
    """Steps of two mtf graphs, built and lowered in turns, know nothing of each other."""
    batches = models.mlp_batches(2)
    meshes = [mtf.Mesh(mtf.Graph(), f"mesh_{i}") for i in range(2)]
    optimizers = [stacked(["local", "clip"], prefix=f"graph_{i}/") for i in range(2)]
    operations = []
    for i, mesh in enumerate(meshes):
        inputs = {k: tf.constant(v) for k, v in batches[i].items()}
        with tf.variable_scope(f"model_{i}"):
            mesh.graph.captured_variable_scope = tf.get_variable_scope()
            operations.append(mlp_step(optimizers[i], mesh, inputs))
    assert StepPlan.of(meshes[0].graph) is not StepPlan.of(meshes[1].graph)
    lowerings = [
        mtf.Lowering(mesh.graph, {mesh: harness.placement(MESH, LAYOUT)}) for mesh in meshes
    ]
    steps = [[lo.lowered_operation(op) for op in ops] for lo, ops in zip(lowerings, operations)]
    with tf.Session(config=harness.placement_config(4)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run([lo.copy_masters_to_slices() for lo in lowerings])
        for _ in range(2):
            session.run(steps)
        session.run([lo.copy_slices_to_masters() for lo in lowerings])
        values = session.run({v.op.name: v for v in tf.global_variables()})
    for i in range(2):

        def build(mesh, inputs):
            return mlp_step(stacked(["local", "clip"]), mesh, inputs), {}

        alone = harness.run("placement", MESH, LAYOUT, build, [batches[i]] * 2).variables
        for name in models.mlp_values():
            np.testing.assert_array_equal(values[f"model_{i}/{name}"], alone[name])


@pytest.mark.slow
def test_two_lowerings_of_one_graph():
    """On two meshes of another shape each; both train as a lowering of its own does."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    batch = models.mlp_batches(1)[0]
    inputs = {k: tf.constant(v) for k, v in batch.items()}
    operations = mlp_step(stacked(["synced", "clip"]), mesh, inputs)
    layouts = [harness.MESHES["2x2"][:2], (MESH, LAYOUT), ("one:1", "")]
    lowerings = []
    for number, layout in enumerate(layouts):
        with tf.variable_scope(f"lowering_{number}"):  # slices have names of their own
            impl = harness.placement(*layout)
            lowerings.append(mtf.Lowering(mesh.graph, {mesh: impl}, autostack=False))
    results = []
    for lowering in lowerings:
        step = [lowering.lowered_operation(op) for op in operations]
        with tf.Session(config=harness.placement_config(4)) as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            session.run(lowering.copy_masters_to_slices())
            session.run(step)
            session.run(step)
            session.run(lowering.copy_slices_to_masters())
            results.append(session.run({v.op.name: v for v in tf.global_variables()}))
    for name, value in models.mlp_values().items():
        assert np.any(results[0][name] != value)
        for other in results[1:]:
            scale = np.max(np.abs(results[0][name]))
            np.testing.assert_allclose(other[name], results[0][name], rtol=0, atol=16 * EPS * scale)


class _Fails(mtf.optimize.SgdOptimizer):
    """Makes a variable, an operation and half of an update, and raises."""

    def apply_grads(self, grads, variables):
        mesh = variables[0].mesh
        mtf.get_variable(mesh, "slot", mtf.Shape([]), initializer=tf.zeros_initializer())
        super().apply_grads(grads[:2], variables[:2])
        raise RuntimeError("no disk")


@pytest.mark.parametrize(
    ("mesh_kind", "names"),
    harness.pairs(
        ["placement", "simd"],
        [["cross_shard"], ["clip"], ["local", "clip"], ["synced"], ["replicas"]],
    ),
    indirect=["mesh_kind"],
)
def test_an_error_in_midway_leaves_graph_and_plan_as_they_were(names, mesh_kind):
    def build(mesh, inputs):
        grads, variables = models.gradients(models.mlp_loss(mesh, inputs))
        before = list(mesh.graph.operations)
        with tf.variable_scope("failed"), pytest.raises(RuntimeError, match="no disk"):
            stacked(names, _Fails(0.1)).apply_grads(grads, variables)
        assert mesh.graph.operations == before
        assert mesh.graph.all_variables == mesh.graph.trainable_variables == variables
        assert not StepPlan.of(mesh.graph).is_in_branch
        return stacked(["cross_shard"]).apply_grads(grads, variables), {}

    found = harness.run(mesh_kind, MESH, LAYOUT, build, models.mlp_batches(1)).variables
    expected = one_update(mesh_kind)
    for name in models.mlp_values():
        np.testing.assert_array_equal(found[name], expected[name])


def test_operations_stay_what_they_are():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.zeros(mesh, mtf.Shape([])) + 1.0
    operation, kind = x.operation, type(x.operation)
    StepPlan.of(mesh.graph).adopt()
    assert isinstance(operation, kind)
    assert isinstance(operation, Planned)
    assert type(operation).__name__ == kind.__name__
    assert StepPlan.of(mesh.graph).adopt() == []


def test_a_recomputed_model_after_the_plan_was_made(mesh_kind):
    """mtf.recompute_grad copies operations; the copies are lowered in their own place."""

    def build(mesh, inputs):
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([mtf.Dimension("batch", 8)]))
        w = mtf.get_variable(mesh, "w", mtf.Shape([]), initializer=tf.constant_initializer(0.5))
        y = mtf.recompute_grad(lambda x: mtf.tanh(x * w), [x])
        StepPlan.of(mesh.graph).adopt()
        (grad,) = mtf.gradients([mtf.reduce_sum(y)], [w])
        opt = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(1.0))
        return opt.apply_grads([grad], [w.operation]), {}

    x = np.linspace(-1, 1, 8).astype("f")
    found = harness.run(mesh_kind, "all:4", "batch:all", build, [{"x": x}]).variables["w"]
    expected = 0.5 - np.sum(x * (1 - np.tanh(0.5 * x.astype(float)) ** 2))
    np.testing.assert_allclose(found, expected, atol=16 * EPS)
