"""Islands with values that are not finite are skipped, counted and begin anew."""

import numpy as np
import pytest

import mtf_gradsync as gs
from tests import harness, models
from tests.optimizers.outer import outer_reference
from tests.optimizers.outer.test_outer_steps import ALL, assert_as_reference, batches

ROUND = 2
SHAPE, LAYOUT, _ = harness.MESHES["4"]


def run(kind, feeds, opt="momentum", **arguments):
    def build(mesh, inputs):
        outer = gs.OuterOptimizer(
            models.OPTIMIZERS[opt](), ROUND, outer_momentum=0.5, mesh_shape=SHAPE, layout=LAYOUT,
            leave_out_not_finite=True, **arguments,
        )  # fmt: skip
        return outer.minimize(models.mlp_loss(mesh, inputs)), gs.reported(outer)

    return harness.run(kind, SHAPE, LAYOUT, build, feeds)


def broken(feeds, step, *islands):
    """Batches of which some islands' parts are NaN in a step."""
    feeds = [{k: v.copy() for k, v in feed.items()} for feed in feeds]
    for island in islands:
        feeds[step]["x"][4 * island : 4 * island + 4] = np.nan
    return feeds


def without(feed, island):
    return {k: np.delete(v, np.s_[4 * island : 4 * island + 4], axis=0) for k, v in feed.items()}


def test_finite_islands_make_the_steps_that_they_make_without(mesh_kind):
    feeds = batches(2 * ROUND)
    found = run(mesh_kind, feeds)
    expected = outer_reference.train("momentum", feeds, 4, ROUND, 0.7, 0.5, True, ALL)
    assert_as_reference(found.variables, expected, len(feeds))
    assert [list(f["outer/skipped"]) for f in found.fetched] == [[0] * 4] * len(feeds)


@pytest.mark.parametrize("step", range(ROUND))
def test_a_skipped_island_is_named_and_starts_from_the_outer_values(step, mesh_kind):
    feeds = broken(batches(ROUND + 1), step, 2)
    found = run(mesh_kind, feeds)
    # The round is that of the three others.
    three = [without(feed, 2) for feed in feeds[:ROUND]]
    expected = outer_reference.train("momentum", three, 3, ROUND, 0.7, 0.5, True, ALL)
    for name, value in expected.outer.items():
        np.testing.assert_allclose(found.variables[name], value, rtol=0, atol=96 * 2**-24)
    assert [list(f["outer/skipped"]) for f in found.fetched] == [
        [0] * 4, [0, 0, 1, 0], [0, 0, 1, 0]
    ]  # fmt: skip
    # Its slots began with zeros: Mesh-TF's momentum moves by the velocity of the step before.
    for name in models.mlp_values():
        np.testing.assert_array_equal(found.variables[f"{name}/island"][2], found.variables[name])
        assert all(np.isfinite(v).all() for v in found.variables.values())
        others = found.variables[f"{name}/island"][[0, 1, 3]]
        assert np.abs(others - found.variables[name]).min() > 0 or name != "w1"


def test_where_no_island_is_finite_the_outer_values_stay(mesh_kind):
    feeds = broken(batches(2 * ROUND), ROUND, 0, 1, 2, 3)
    found = run(mesh_kind, feeds).variables
    before = run(mesh_kind, feeds[:ROUND]).variables
    for name in models.mlp_values():
        for kept in (name, f"{name}/outer_momentum"):
            np.testing.assert_array_equal(found[kept], before[kept])
        np.testing.assert_array_equal(found[f"{name}/island"], np.stack([before[name]] * 4))
    assert list(found["OuterOptimizer/skipped"]) == [1] * 4


def test_all_fragments_of_a_skipped_island_begin_anew(mesh_kind):
    """Or what is left of it would spread to the others' values on the next step."""
    feeds = broken(batches(ROUND + 2), 0, 1)
    found = run(mesh_kind, feeds, "sgd", fragments=2)
    # Skipped once, at the first turn after the first step.
    assert [list(f["outer/skipped"]) for f in found.fetched] == [[0, 1, 0, 0]] * (ROUND + 2)
    assert all(np.isfinite(v).all() for v in found.variables.values())


def test_without_it_a_nan_of_one_island_reaches_all():
    feeds = broken(batches(ROUND), 0, 1)
    outer = {"mesh_shape": SHAPE, "layout": LAYOUT}
    build = models.train(lambda: gs.OuterOptimizer(models.OPTIMIZERS["sgd"](), ROUND, **outer))
    found = harness.run("simd", SHAPE, LAYOUT, build, feeds).variables
    assert np.isnan(found["w1"]).all()
