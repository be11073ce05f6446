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


class Clipped:
    """An optimizer of `reference` behind clipping by the global norm."""

    def __init__(self, update):
        self.update = update
        self.clipped = 0

    def __call__(self, values, grads):
        norm = np.sqrt(sum(np.square(g).sum() for g in grads.values()))
        self.clipped += norm > NORM
        return self.update(values, {k: g * min(1, NORM / norm) for k, g in grads.items()})


def check(kind, mesh, optimizer, **kwargs):
    shape, layout, batch_dims = harness.MESHES[mesh]
    feeds = models.mlp_batches(STEPS)
    make = lambda: gs.ClipByGlobalNormOptimizer(models.OPTIMIZERS[optimizer](), NORM)  # noqa: E731
    result = harness.run(kind, shape, layout, models.train(make, batch_dims), feeds, **kwargs)
    model = Clipped(reference.OPTIMIZERS[optimizer]())
    expected = reference.train(model, feeds)
    assert model.clipped
    for name, value in expected.items():
        np.testing.assert_allclose(
            result.variables[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
        )


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


@pytest.mark.parametrize("norm", [0, -1, "x", None])
def test_bad_norm(norm):
    with pytest.raises((ValueError, TypeError), match="clip_norm"):
        gs.ClipByGlobalNormOptimizer(mtf.optimize.SgdOptimizer(1.0), norm)
