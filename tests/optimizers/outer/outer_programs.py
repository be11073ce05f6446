"""Outer steps of the small model, on every runtime."""

import numpy as np

import mtf_gradsync as gs
from tests import harness, models
from tests.optimizers.outer import outer_reference

TWO_OF_SLICES, THREE_OF_SLICES = (
    outer_reference.cut(4, 15, 24),
    outer_reference.cut(4, 10, 20, 24),
)


def batches(steps):
    """Small ones, on which momentum inside of momentum does not diverge."""
    return [{k: v * np.float32(0.3) for k, v in x.items()} for x in models.mlp_batches(steps)]


def assert_as_reference(found, expected, steps):
    """Each step rounds a gradient and an update a few times, relative to values of about 1.

    Adam divides by a root: what a gradient is off by counts relative to the gradient, which is
    about a hundredth of the values.
    """
    atol = steps * 32 * 2**-24
    for name, value in expected.outer.items():
        assert np.isfinite(value).all()
        np.testing.assert_allclose(found[name], value, rtol=0, atol=atol)
        islands = np.stack([island[name] for island in expected.islands])
        np.testing.assert_allclose(found[f"{name}/island"], islands, rtol=0, atol=atol)


MESHES = {
    "2": ("all:2", "batch:all", ("batch",)),
    "4": ("all:4", "batch:all", ("batch",)),
    "8": ("all:8", "batch:all", ("batch",)),
    "2x2": ("a:2;b:2", "outer:a;batch:b", ("outer", "batch")),
}


ROUND = 3


def built(kind, mesh, inner_steps=ROUND, opt="momentum", inside=lambda opt, mesh: opt, **arguments):
    shape, layout, dims = MESHES[mesh]

    def make():
        inner = inside(models.OPTIMIZERS[opt](), mesh)
        if not inner_steps:
            return gs.CrossShardOptimizer(inner)
        return gs.OuterOptimizer(
            inner, inner_steps, outer_momentum=0.5, mesh_shape=shape, layout=layout,
            batch_dims=dims, outer_dims=dims[:1], **arguments,
        )  # fmt: skip

    return harness.built(kind, shape, layout, models.train(make, dims), batches(1)[0])


def where(mesh):
    shape, layout, dims = MESHES[mesh]
    return {"mesh_shape": shape, "layout": layout, "batch_dims": dims}
