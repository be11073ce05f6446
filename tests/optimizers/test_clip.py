"""ClipByGlobalNormOptimizer against numpy in float64."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from tests import harness, models, reference

STEPS = 4
NORM = 0.2
# As for CrossShardOptimizer's trajectories.
TOLERANCE = STEPS * 16 * np.finfo(np.float32).eps


def check(kind, mesh, optimizer, **kwargs):
    shape, layout, batch_dims = harness.MESHES[mesh]
    feeds = models.mlp_batches(STEPS)
    make = lambda: gs.ClipByGlobalNormOptimizer(models.OPTIMIZERS[optimizer](), NORM)  # noqa: E731
    result = harness.run(kind, shape, layout, models.train(make, batch_dims), feeds, **kwargs)
    model = reference.Clipped(reference.OPTIMIZERS[optimizer](), NORM)
    expected = reference.train(model, feeds)
    assert model.clipped
    reference.assert_close(result.variables, expected, TOLERANCE)


OPTIMIZERS = sorted(models.OPTIMIZERS)


@pytest.mark.parametrize(
    ("kind", "mesh", "optimizer"),
    harness.on_both(
        [*harness.pairs(["2x2"], OPTIMIZERS), ("4", "adam"), ("2x2x2", "adafactor")],
        [("2x2", "adafactor"), ("4", "momentum")],
    ),
)
@pytest.mark.mostly_slow(every=3)
def test_trajectory(kind, mesh, optimizer):
    check(kind, mesh, optimizer)


def test_trajectory_with_shuffled_cores():
    check("simd", "4x2", "adafactor", logical_to_physical=harness.SHUFFLED)


def test_per_shard_gradients_are_summed_first(mesh_kind):
    axes = gs.ReplicaAxes("all:4", "batch:all")
    batch, d = mtf.Dimension("batch", 4), mtf.Dimension("d", 3)
    grads = np.random.RandomState(0).randn(4, 3).astype("f")

    def build(mesh, inputs):
        w = mtf.get_variable(mesh, "w", mtf.Shape([d]), initializer=models.tf.zeros_initializer())
        grad = mtf.import_tf_tensor(mesh, inputs["g"], mtf.Shape([batch, d]))
        inner = mtf.optimize.SgdOptimizer(1.0)
        optimizer = gs.ClipByGlobalNormOptimizer(inner, NORM, axes=axes)
        return optimizer.apply_grads([grad], [w.operation]), {}

    w = harness.run(mesh_kind, "all:4", "batch:all", build, [{"g": grads}]).variables["w"]
    total = grads.sum(0, dtype=float)
    np.testing.assert_allclose(w, -NORM * total / np.linalg.norm(total), rtol=TOLERANCE)


STACKS = {
    "accumulation": lambda opt, axes: gs.GradientAccumulationOptimizer(
        opt, 1, should_skip_update_fn=gs.skip_large_updates(1e25), axes=axes
    ),
    "loss scale": lambda opt, axes: gs.LossScaleOptimizer(opt, loss_scale=1.0, axes=axes),
}


@pytest.mark.parametrize("stack", sorted(STACKS))
def test_gradients_whose_squares_overflow_are_trained_on(stack, mesh_kind):
    """They are neither skipped nor an overflow, and their norms are reported."""
    axes = gs.ReplicaAxes("all:2", "batch:all")
    batch, d = mtf.Dimension("batch", 2), mtf.Dimension("d", 2)

    def build(mesh, inputs):
        w = mtf.get_variable(mesh, "w", mtf.Shape([d]), initializer=models.tf.zeros_initializer())
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, d]))
        grads = mtf.gradients([mtf.reduce_sum(x * w)], [w])
        optimizer = gs.ClipByGlobalNormOptimizer(mtf.optimize.SgdOptimizer(1.0), 1.0)
        optimizer = STACKS[stack](optimizer, axes)
        updates = optimizer.apply_grads(grads, [w.operation])
        return updates, gs.reported(optimizer)

    x = np.array([[3e19, 0], [0, 4e19]], "f")
    result = harness.run(mesh_kind, "all:2", "batch:all", build, [{"x": x}])
    np.testing.assert_allclose(result.variables["w"], [-0.6, -0.8], rtol=1e-6)
    found = result.fetched[0]
    np.testing.assert_allclose(found["gradient_norm/before_clipping"], 5e19, rtol=1e-6)
    np.testing.assert_allclose(found["gradient_norm/of_shards"], [3e19, 4e19], rtol=1e-6)
    skipped = {"accumulation": "accumulation/skipped", "loss scale": "loss_scale/skipped"}
    assert found[skipped[stack]] == 0
