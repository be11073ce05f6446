"""What stands inside works on each island as without islands; what sends, sends less."""

import numpy as np
import pytest

import mtf_gradsync as gs
from tests import harness, models, reference
from tests.optimizers.outer import outer_reference
from tests.optimizers.outer.outer_programs import MESHES, assert_as_reference, batches, built, where
from tests.optimizers.outer.outer_reference import ALL
from tests.optimizers.pipeline.rounded_programs import rounding

ROUND = 2
CLIP = 1.5


def trained(kind, mesh, feeds, inside=lambda opt, mesh: opt, opt="sgd", **arguments):
    return built(kind, mesh, ROUND, opt, inside, **arguments).run(feeds).variables


def expected_of(mesh, feeds, opt="sgd", **changes):
    islands = 2 if mesh == "2x2" else int(mesh)
    return outer_reference.train(opt, feeds, islands, ROUND, 0.7, 0.5, True, ALL, **changes)


@pytest.mark.parametrize(
    ("mesh_kind", "mesh"), [("simd", "4"), ("placement", "2x2")], indirect=["mesh_kind"]
)
def test_each_island_clips_by_its_own_norm(mesh, mesh_kind):
    norms = []

    def clip(grads):
        norms.append(reference.norm(grads))
        return reference.clipped(grads, CLIP)

    feeds = batches(4)
    expected = expected_of(mesh, feeds, change=clip)
    assert min(norms) < CLIP < max(norms)
    found = trained(
        mesh_kind, mesh, feeds, lambda opt, mesh: gs.ClipByGlobalNormOptimizer(opt, CLIP)
    )
    assert_as_reference(found, expected, 4)


def test_all_islands_skip_a_step_that_overflows_on_one(mesh_kind):
    """A loss scale is one for all islands: an island by itself would go on at another one."""
    feeds = batches(5)
    feeds[1]["x"][-1] = np.inf  # of the last island
    found = trained(
        mesh_kind, "2", feeds, lambda opt, mesh: gs.LossScaleOptimizer(opt, initial_scale=16.0)
    )
    expected = expected_of("2", feeds[:1] + feeds[2:])
    assert_as_reference(found, expected, 5)
    assert found["LossScaleOptimizer/skipped"] == 1
    assert found["LossScaleOptimizer/scale"] == 8.0
    assert found["OuterOptimizer/inner_step"] == 4


@pytest.mark.parametrize(
    ("mesh_kind", "is_inside"),
    [("placement", False), ("simd", True)],
    indirect=["mesh_kind"],
)
def test_averages_are_of_the_outer_values(is_inside, mesh_kind):
    shape, layout, _ = MESHES["2"]

    def make():
        inner = models.OPTIMIZERS["sgd"]()
        if is_inside:
            inner = gs.AverageOptimizer(inner, 0.5)
        outer = gs.OuterOptimizer(inner, ROUND, outer_momentum=0.5, **where("2"))
        return outer if is_inside else gs.AverageOptimizer(outer, 0.5)

    feeds = batches(3)
    found = harness.run(mesh_kind, shape, layout, models.train(make), feeds).variables
    start = models.mlp_values()
    for name, value in expected_of("2", feeds).outer.items():
        # Of two steps with an outer step behind them, and one before.
        average = value - (value - start[name]) / 4
        np.testing.assert_allclose(
            found[f"{name}/ExponentialMovingAverage"], average, rtol=0, atol=96 * 2**-24
        )


@pytest.mark.slow
def test_the_reducer_is_for_outer_gradients_alone():
    dtypes = {}
    for reducer in (None, gs.reduce.CompressedAllReduce()):
        made = built("simd", "2x2", ROUND, reducer=reducer)
        rows = made.collectives().rows
        dtypes[reducer is None] = [(r.group, r.dtype, r.shape) for r in rows]
    plain, narrow = dtypes[True], dtypes[False]
    changed = [(x, y) for x, y in zip(plain, narrow) if x != y]
    assert len(plain) == len(narrow)
    assert changed
    for (axis, dtype, shape), (_, narrow_dtype, _) in changed:
        assert (axis, dtype, narrow_dtype) == ("a", "float32", "bfloat16")
        assert shape in [(6, 8), (8,), ()]
    assert {shape for axis, _, shape in plain if axis == "b"} >= {(6, 8), (8,)}


def test_a_strategy_with_state_is_used_for_outer_gradients(mesh_kind):
    """Differences are rounded to eighths; what was not sent is kept for the next round."""
    feeds = batches(ROUND)
    found = built(mesh_kind, "2", ROUND, "sgd", reducer=rounding(), outer_learning_rate=1.0)
    found = found.run(feeds).variables
    expected = outer_reference.train("sgd", feeds[:ROUND], 2, 9, 0.7, 0.5, True, ALL)
    start = models.mlp_values()
    for name, value in start.items():
        away = np.stack([value - island[name] for island in expected.islands])
        sent = np.floor(away * 8 + 0.5) / 8
        np.testing.assert_allclose(
            found[f"{name}/rounding_error"], away - sent, rtol=0, atol=64 * 2**-24
        )
        outer = value - 1.5 * sent.mean(0)
        np.testing.assert_allclose(found[name], outer, rtol=0, atol=64 * 2**-24)
    assert not [n for n in found if "rounding_error" in n and n.endswith("island")]
