"""The scale in checkpoints: kept, begun after a run without it, left behind by a run without it."""

import functools

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from tests import harness
from tests.sessions import ran

RULE = {"initial_scale": 8.0, "growth_steps": 2, "max_scale": 64.0}


def plain():
    return gs.CrossShardOptimizer(mtf.optimize.MomentumOptimizer(0.5, 0.5))


def scaled(**rule):
    return gs.LossScaleOptimizer(plain(), **{**RULE, **rule})


def fixed():
    return scaled(loss_scale=4.0)


STATE = [f"LossScaleOptimizer/{name}" for name in ("scale", "good_steps", "skipped")]


@functools.lru_cache(maxsize=None)
def built(make, mesh):
    """A program on a mesh of CPU replicas, for several sessions."""

    def build(mesh, inputs):
        dims = mtf.Shape([mtf.Dimension("batch", 4), mtf.Dimension("d", 2)])
        x = mtf.import_tf_tensor(mesh, inputs["x"], dims)
        w = mtf.get_variable(mesh, "w", dims[1:])
        return make().minimize(mtf.reduce_sum(x * w)), {}

    return harness.built("simd", mesh, "batch:all", build, feed())


def run(make, mesh, feeds, restore=None, save=None):
    """Makes steps; returns the variables."""
    return ran(built(make, mesh), feeds, restore, save)


def feed(value=1.0):
    return {"x": np.full([4, 2], value, "f")}


BATCHES = [feed(1), feed(np.nan), feed(2), feed(3), feed(np.inf), feed(4)]


@pytest.mark.parametrize(("first", "then"), [("all:4", "all:4"), ("all:4", "all:2")])
def test_a_run_that_was_stopped_goes_on_exactly(first, then, tmp_path):
    path = str(tmp_path / "saved")
    run(scaled, first, BATCHES[:3], save=path)
    found = run(scaled, then, BATCHES[3:], restore=path)
    expected = run(scaled, "all:4", BATCHES)
    for name in ("w", "w_momentum_v", *STATE):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_a_checkpoint_without_a_scale_begins_one(tmp_path):
    path = str(tmp_path / "saved")
    before = run(plain, "all:4", [feed(1), feed(2)], save=path)
    found = run(scaled, "all:4", [feed(np.nan)], restore=path)
    np.testing.assert_array_equal(found["w"], before["w"])
    assert [found[name] for name in STATE] == [4.0, 0, 1]


def test_a_run_without_a_scale_leaves_it_behind(tmp_path):
    path = str(tmp_path / "saved")
    run(scaled, "all:4", BATCHES[:1], save=path)
    found = run(plain, "all:4", [feed(2)], restore=path)
    np.testing.assert_array_equal(found["w"], run(plain, "all:4", [feed(1), feed(2)])["w"])


def test_a_fixed_scale_is_that_of_the_program(tmp_path):
    path = str(tmp_path / "saved")
    run(scaled, "all:4", BATCHES[:2], save=path)
    found = run(fixed, "all:4", BATCHES[:2], restore=path)
    assert found["LossScaleOptimizer/skipped"] == 2
    assert "LossScaleOptimizer/scale" not in found
