"""Islands with losses or values that are not finite are skipped, named, counted and restarted."""

import functools
import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.tools.train.loop import most_bad_losses
from tests import harness, models, reference
from tests.optimizers.outer import outer_reference
from tests.optimizers.outer.outer_programs import assert_as_reference, batches
from tests.optimizers.outer.outer_reference import ALL

ROUND = 2
SHAPE, LAYOUT, _ = harness.MESHES["4"]


def program(kind, feed, opt="momentum", mesh="4", **arguments):
    shape, layout, _ = harness.MESHES[mesh]

    def build(mtf_mesh, inputs):
        outer = gs.OuterOptimizer(
            models.OPTIMIZERS[opt](), ROUND, outer_momentum=0.5, mesh_shape=shape, layout=layout,
            leave_out_not_finite=True, **arguments,
        )  # fmt: skip
        return outer.minimize(models.mlp_loss(mtf_mesh, inputs)), gs.reported(outer)

    return harness.built(kind, shape, layout, build, feed)


@functools.lru_cache(maxsize=None)
def with_momentum(kind):
    return program(kind, batches(1)[0])


def broken(feeds, step, *islands, size=4):
    """Batches of which some islands' parts, of `size` rows, are NaN in a step."""
    feeds = [{k: v.copy() for k, v in feed.items()} for feed in feeds]
    for island in islands:
        feeds[step]["x"][size * island : size * (island + 1)] = np.nan
    return feeds


def without(feed, island, size=4):
    rows = np.s_[size * island : size * (island + 1)]
    return {k: np.delete(v, rows, axis=0) for k, v in feed.items()}


@pytest.mark.slow
def test_finite_islands_make_the_steps_that_they_make_without(mesh_kind):
    feeds = batches(2 * ROUND)
    found = with_momentum(mesh_kind).run(feeds)
    expected = outer_reference.train("momentum", feeds, 4, ROUND, 0.7, 0.5, True, ALL)
    assert_as_reference(found.variables, expected, len(feeds))
    assert [list(f["outer/skipped"]) for f in found.fetched] == [[0] * 4] * len(feeds)


@pytest.mark.parametrize(
    ("mesh_kind", "step"),
    harness.pairs(["placement", "simd"], range(ROUND)),
    indirect=["mesh_kind"],
)
@pytest.mark.mostly_slow(keep="simd")
def test_a_skipped_island_is_named_and_starts_from_the_outer_values(step, mesh_kind):
    feeds = broken(batches(ROUND + 1), step, 2)
    found = with_momentum(mesh_kind).run(feeds)
    # The round is that of the three others.
    three = [without(feed, 2) for feed in feeds[:ROUND]]
    expected = outer_reference.train("momentum", three, 3, ROUND, 0.7, 0.5, True, ALL)
    reference.assert_close(found.variables, expected.outer, atol=96 * 2.0**-24)
    assert [list(f["outer/skipped"]) for f in found.fetched] == [
        [0] * 4, [0, 0, 1, 0], [0, 0, 1, 0]
    ]  # fmt: skip
    # Its slots began with zeros: Mesh-TF's momentum moves by the velocity of the step before.
    for name in models.mlp_values():
        np.testing.assert_array_equal(found.variables[f"{name}/island"][2], found.variables[name])
        assert reference.is_finite(found.variables)
        others = found.variables[f"{name}/island"][[0, 1, 3]]
        assert np.abs(others - found.variables[name]).min() > 0 or name != "w1"


@pytest.mark.slow
def test_on_shared_copies_with_a_second_axis_in_many_sessions():
    """Along `cols` processors have the same slices of all that is not split over it."""
    feeds = broken(batches(ROUND + 1), 0, 1, size=8)
    made = program("shared", feeds[0], mesh="2x2")
    assert not made.races()
    one = [without(feed, 1, 8) for feed in feeds[:ROUND]]
    expected = outer_reference.train("momentum", one, 1, ROUND, 0.7, 0.5, True, ALL)
    for _ in range(6):
        found = made.run(feeds)
        reference.assert_close(found.variables, expected.outer, atol=96 * 2.0**-24)
        assert [list(f["outer/skipped"]) for f in found.fetched] == [[0, 0], [0, 1], [0, 1]]
        assert found.variables["OuterOptimizer/inner_step"] == len(feeds)


def test_where_no_island_is_finite_the_outer_values_stay(mesh_kind):
    feeds = broken(batches(2 * ROUND), ROUND, 0, 1, 2, 3)
    _, before, _, found = with_momentum(mesh_kind).after_each(feeds)
    for name in models.mlp_values():
        for kept in (name, f"{name}/outer_momentum"):
            np.testing.assert_array_equal(found[kept], before[kept])
        np.testing.assert_array_equal(found[f"{name}/island"], np.stack([before[name]] * 4))
    assert list(found["OuterOptimizer/skipped"]) == [1] * 4


LINE = "OuterOptimizer: outer step without islands whose loss or values are not finite: "


def named(**arguments):
    """What a run of a round without islands 0 and 2, and one with all, says of it."""
    hooks = []

    def build(mesh, inputs):
        inner = models.OPTIMIZERS["sgd"]()
        opt = gs.OuterOptimizer(
            inner, ROUND, mesh_shape=SHAPE, layout=LAYOUT, leave_out_not_finite=True, **arguments
        )
        with pytest.raises(ValueError, match="has no step yet"):
            opt.make_session_run_hook().begin()
        hooks.append(opt.make_session_run_hook())
        updates = opt.minimize(models.mlp_loss(mesh, inputs))
        return updates, {}

    return build, hooks


@pytest.mark.slow
def test_a_placement_mesh_prints_the_skipped_islands(capfd):
    build, _ = named()
    harness.run("placement", SHAPE, LAYOUT, build, broken(batches(2 * ROUND), 0, 0, 2))
    printed = capfd.readouterr().err.splitlines()
    assert [line for line in printed if line.startswith(LINE)] == [LINE + "0, 2."]


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.mostly_slow
def test_elsewhere_the_session_logs_them_once(fragments, caplog):
    build, hooks = named(fragments=fragments)
    feeds = broken(batches(2 * ROUND), 0, 0, 2)
    built = harness.built("simd", SHAPE, LAYOUT, build, feeds[0])
    (hook,) = hooks
    with built.graph.as_default(), caplog.at_level(logging.WARNING, "mtf_gradsync"):
        hook.begin()
        with built._session() as session:
            hook.after_create_session(session, None)
            lines = []
            for values in feeds:
                session.run(built.updates, {built.inputs[k]: v for k, v in values.items()})
                hook.after_run(tf.train.SessionRunContext(None, session), None)
                logged = [record.getMessage() for record in caplog.records]
                lines.append([line for line in logged if line.startswith(LINE)])
    skipped_at = ROUND // fragments - 1
    assert lines == [[LINE + "0, 2."] if i >= skipped_at else [] for i in range(len(feeds))]


@pytest.mark.parametrize(("step", "shard_loss"), [(0, False), (1, True)])
@pytest.mark.mostly_slow
def test_an_island_whose_loss_alone_is_not_finite_is_skipped(step, shard_loss, mesh_kind):
    """What is added to the loss has no gradient, so that all values stay finite."""
    shape, layout, _ = harness.MESHES["2"]

    def build(mesh, inputs):
        opt = gs.OuterOptimizer(
            models.OPTIMIZERS["sgd"](), ROUND, outer_momentum=0.5, mesh_shape=shape, layout=layout,
            leave_out_not_finite=True,
        )  # fmt: skip
        batch, shards = mtf.Dimension("batch", 16), mtf.Dimension("batch", 2)
        added = mtf.import_tf_tensor(mesh, inputs["added"], mtf.Shape([batch]))
        if shard_loss:
            added = mtf.reshape(added, mtf.Shape([shards, mtf.Dimension("each", 8)]))
            added = mtf.reduce_mean(added, output_shape=mtf.Shape([shards]))
        else:
            added = mtf.reduce_mean(added)
        return opt.minimize(models.mlp_loss(mesh, inputs) + added), {}

    feeds = [{**x, "added": np.zeros(16, "f")} for x in batches(2 * ROUND)]
    feeds[step]["added"][8] = np.inf
    built = harness.built(mesh_kind, shape, layout, build, feeds[0])
    after = built.after_each(feeds)
    assert [list(values["OuterOptimizer/skipped"]) for values in after] == [
        [0, 0], [0, 1], [0, 1], [0, 1]
    ]  # fmt: skip
    assert list(after[-1]["OuterOptimizer/bad_loss"]) == [0, 1]
    other = [without(feed, 1, 8) for feed in feeds[:ROUND]]
    expected = outer_reference.train("sgd", other, 1, ROUND, 0.7, 0.5, True, ALL).outer
    reference.assert_close(after[ROUND - 1], expected, atol=96 * 2.0**-24)


def test_a_run_waits_two_rounds_for_a_finite_loss():
    def outer(steps, leave_out=True):
        inner = models.OPTIMIZERS["sgd"]()
        return gs.OuterOptimizer(
            inner, steps, mesh_shape=SHAPE, layout=LAYOUT, leave_out_not_finite=leave_out
        )

    assert most_bad_losses([outer(500)]) == 1000
    assert most_bad_losses([outer(2)]) == 100
    assert most_bad_losses([outer(500, leave_out=False)]) == 0


@pytest.mark.mostly_slow
def test_a_skipped_island_restarts_in_all_fragments(mesh_kind):
    """Or what is left of it would spread to the others' values on the next step."""
    feeds = broken(batches(ROUND + 2), 0, 1, size=8)
    found = program(mesh_kind, feeds[0], "sgd", "2", fragments=2).run(feeds)
    # Skipped once, on the outer step after the first step.
    assert [list(f["outer/skipped"]) for f in found.fetched] == [[0, 1]] * (ROUND + 2)
    assert reference.is_finite(found.variables)


@pytest.mark.slow
def test_variables_restart_with_outer_values_and_slots_with_zeros(mesh_kind):
    """Also the half of "w1" that is not in the first fragment, and slots of all variables."""
    feeds = broken(batches(1), 0, 1, size=8)
    found = program(mesh_kind, feeds[0], "adam", "2", fragments=2).run(feeds).variables
    start = models.mlp_values()
    assert np.abs(found["w1"] - start["w1"]).ravel()[:29].min() > 0
    np.testing.assert_array_equal(found["w1"].ravel()[29:], start["w1"].ravel()[29:])
    for name in start:
        np.testing.assert_array_equal(found[f"{name}/island"][1], found[name])
        assert not found[f"{name}/adam_m/island"][1].any()
        assert not found[f"{name}/adam_v/island"][1].any()
        assert found[f"{name}/adam_m/island"][0].any()
    other = found["w1/island"][0].ravel()
    np.testing.assert_array_equal(other[:29], found["w1"].ravel()[:29])
    assert np.abs(other[29:] - start["w1"].ravel()[29:]).min() > 0


def test_without_it_a_nan_of_one_island_reaches_all():
    feeds = broken(batches(ROUND), 0, 1)
    outer = {"mesh_shape": SHAPE, "layout": LAYOUT}
    build = models.train(lambda: gs.OuterOptimizer(models.OPTIMIZERS["sgd"](), ROUND, **outer))
    found = harness.run("simd", SHAPE, LAYOUT, build, feeds).variables
    assert np.isnan(found["w1"]).all()
