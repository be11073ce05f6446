"""GradientAccumulationOptimizer: trajectories, schedules, skipping, state."""

import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._tf_compat import mtf, tf
from mtf_gradsync.optimizers.accumulation import LOCAL, SYNCED
from tests import harness, models, reference

EPS = np.finfo(np.float32).eps
K = 3
STEPS = 2 * K
# As for the trajectories of CrossShardOptimizer, with one more rounding a micro step.
TOLERANCE = STEPS * 16 * EPS


def accumulate(inner, mesh, passes=K, place=LOCAL, **kwargs):
    """The wrapper with the mesh, where it needs one."""
    if place == LOCAL:
        shape, layout, batch_dims = harness.MESHES[mesh]
        kwargs = dict(mesh_shape=shape, layout=layout, batch_dims=batch_dims, **kwargs)
    return gs.GradientAccumulationOptimizer(inner, passes, **kwargs)


def run(kind, mesh, make, feeds, **kwargs):
    shape, layout, batch_dims = harness.MESHES[mesh]
    return harness.run(kind, shape, layout, models.train(make, batch_dims), feeds, **kwargs)


def joined(feeds, size=K):
    """One big batch for each `size` micro batches."""
    return [
        {k: np.concatenate([f[k] for f in feeds[i : i + size]]) for k in feeds[0]}
        for i in range(0, len(feeds), size)
    ]


def assert_close(actual, expected, tolerance=TOLERANCE):
    for name in expected:
        np.testing.assert_allclose(
            actual[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


@pytest.mark.parametrize("place", [LOCAL, SYNCED])
@pytest.mark.parametrize("optimizer", sorted(models.OPTIMIZERS))
@pytest.mark.parametrize("mesh", ["8", "4x2"])
def test_mean_equals_one_batch_of_all_micro_batches(mesh_kind, mesh, optimizer, place):
    feeds = models.mlp_batches(STEPS)
    make = models.OPTIMIZERS[optimizer]
    result = run(
        mesh_kind,
        mesh,
        lambda: accumulate(make(), mesh, place=place, average_aggregated_gradients=True),
        feeds,
    )
    assert_close(result.variables, reference.train(optimizer, joined(feeds)))


@pytest.mark.parametrize("wrap", ["around cross-shard", "alone", "three axes"])
@pytest.mark.parametrize("autostack", [True, False])
def test_sum_is_k_times_the_mean(mesh_kind, autostack, wrap):
    feeds = models.mlp_batches(STEPS)
    mesh = "2x2x2" if wrap == "three axes" else "4x2"

    def make():
        inner = mtf.optimize.SgdOptimizer(0.1 / K)
        inner = gs.CrossShardOptimizer(inner) if wrap == "around cross-shard" else inner
        return accumulate(inner, mesh)

    result = run(mesh_kind, mesh, make, feeds, autostack=autostack)
    assert_close(result.variables, reference.train("sgd", joined(feeds)))
