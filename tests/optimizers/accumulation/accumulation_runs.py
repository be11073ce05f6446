"""What the tests of GradientAccumulationOptimizer share: the model with it, and its tolerance."""

from __future__ import annotations

import functools

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.accumulation import LOCAL, SYNCED
from tests import harness, models, reference

EPS = np.finfo(np.float32).eps
K = 3
STEPS = 2 * K
# As for the trajectories of CrossShardOptimizer, with one more rounding a microbatch step.
TOLERANCE = STEPS * 16 * EPS


def accumulate(inner, mesh, passes=K, place=LOCAL, **kwargs):
    """The wrapper with the mesh, where it needs one."""
    if place != SYNCED:
        shape, layout, batch_dims = harness.MESHES[mesh]
        kwargs = dict(mesh_shape=shape, layout=layout, batch_dims=batch_dims, **kwargs)
    kwargs = kwargs if place == LOCAL else {"accumulate": place, **kwargs}
    return gs.GradientAccumulationOptimizer(inner, passes, **kwargs)


def run(kind, mesh, make, feeds, **kwargs):
    shape, layout, batch_dims = harness.MESHES[mesh]
    return harness.run(kind, shape, layout, models.train(make, batch_dims), feeds, **kwargs)


def built(kind, mesh, make, autostack=True):
    """The model's training step, for several runs."""
    shape, layout, batch_dims = harness.MESHES[mesh]
    (feed,) = models.mlp_batches(1)
    return harness.built(kind, shape, layout, models.train(make, batch_dims), feed, autostack)


def joined(feeds, size=K):
    """One big batch for each `size` micro batches."""
    return [
        {k: np.concatenate([f[k] for f in feeds[i : i + size]]) for k in feeds[0]}
        for i in range(0, len(feeds), size)
    ]


def assert_close(actual, expected, tolerance=TOLERANCE):
    reference.assert_close(actual, expected, tolerance)


def two_parameter_model(dtype=tf.float32):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    shape = mtf.Shape([mtf.Dimension("d", 2)])
    weights = [
        mtf.get_variable(mesh, n, shape, dtype, initializer=tf.ones_initializer()).operation
        for n in ("v", "w")
    ]
    return mesh, weights, [mtf.ones(mesh, shape, dtype) for _ in weights]


MESH, LAYOUT, _ = harness.MESHES["2x2"]


def simd_report(make, mesh_shape=MESH, layout=LAYOUT):
    """The collectives of the model's training step."""
    (feed,) = models.mlp_batches(1)
    return harness.built("simd", mesh_shape, layout, models.train(make), feed).collectives()


def gradient_rows(report):
    """What crosses the replica axis: gradients in this model, but for the loss, a mean."""
    return [r for r in report.rows if r.group == "rows" and "reduce_mean/" not in r.name]


class NoUpdate(mtf.optimize.Optimizer):
    """Touches no gradient."""

    def apply_grads(self, grads, variables):
        return []


@functools.lru_cache(maxsize=None)
def report_without_update(mesh_shape=MESH):
    return simd_report(NoUpdate, mesh_shape)
