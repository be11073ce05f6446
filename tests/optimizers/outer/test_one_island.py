"""Outer steps of a single island (SNOO): on any mesh or on none, against numpy; nothing is sent."""

import numpy as np
import pytest

import mtf_gradsync as gs
from tests import harness, models
from tests.optimizers.outer import outer_reference
from tests.optimizers.outer.outer_programs import TWO_OF_SLICES, batches
from tests.optimizers.outer.outer_reference import ALL
from tests.sessions import ran

STEPS, ROUND = 6, 3
# Mesh, layout and what the wrapper is given, which is an island of the whole mesh.
WHERE = {
    "none known": (*harness.ONE, {"outer_dims": ()}),
    "one processor": (*harness.ONE, {"mesh_shape": harness.ONE[0], "layout": harness.ONE[1]}),
    "an axis of one": ("all:1", "batch:all", {"mesh_shape": "all:1", "layout": "batch:all"}),
    "two replicas": (*harness.MESHES["2x2"][:2], {"outer_dims": ()}),
}


def built(kind, where, wrap=lambda outer: outer, inner=models.OPTIMIZERS["momentum"], **given):
    shape, layout, arguments = WHERE[where]

    def make():
        outer = gs.OuterOptimizer(inner(), ROUND, outer_momentum=0.5, **arguments, **given)
        assert outer.islands.num_shards == 1
        return wrap(outer)

    return harness.built(kind, shape, layout, models.train(make), batches(1)[0])


def expected(feeds, fragments=ALL, opt="momentum", **given):
    trained = outer_reference.train(opt, feeds, 1, ROUND, 0.7, 0.5, True, fragments, **given)
    return trained._replace(islands=trained.islands[0])


def assert_close(found, numpy, steps=STEPS):
    for name, value in numpy.outer.items():
        bound = {"rtol": 0, "atol": steps * 32 * 2**-24, "err_msg": name}
        np.testing.assert_allclose(found[name], value, **bound)
        own = found[f"{name}/island"]
        np.testing.assert_allclose(own.reshape(value.shape), numpy.islands[name], **bound)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.mostly_slow
def test_it_is_a_look_ahead(mesh_kind, where):
    made = built(mesh_kind, where)
    feeds = batches(STEPS)
    for steps in (STEPS, STEPS - 1):  # where a round ends, and between
        assert_close(made.run(feeds[:steps]).variables, expected(feeds[:steps]))


@pytest.mark.mostly_slow
def test_fragments_on_two_replicas(mesh_kind):
    feeds = batches(4)
    shape, layout, given = WHERE["two replicas"]
    make = lambda: gs.OuterOptimizer(  # noqa: E731
        models.OPTIMIZERS["sgd"](), 2, outer_momentum=0.5, fragments=2, **given
    )
    found = harness.run(mesh_kind, shape, layout, models.train(make), feeds).variables
    numpy = outer_reference.train("sgd", feeds, 1, 2, 0.7, 0.5, True, TWO_OF_SLICES)
    assert_close(found, numpy._replace(islands=numpy.islands[0]))


def test_nothing_is_sent():
    def sent(make):
        shape, layout, _ = WHERE["two replicas"]
        made = harness.built("simd", shape, layout, models.train(make), batches(1)[0])
        rows = made.collectives().rows
        return sorted((row.group, row.bytes_per_step, row.is_conditional) for row in rows)

    inner = models.OPTIMIZERS["momentum"]
    one = sent(lambda: gs.OuterOptimizer(inner(), ROUND, outer_dims=()))
    assert one == sent(lambda: gs.CrossShardOptimizer(inner()))
    assert one


@pytest.mark.slow
def test_a_nan_restarts_it_from_the_outer_values(mesh_kind):
    made = built(mesh_kind, "two replicas", leave_out_not_finite=True)
    feeds = batches(2 * ROUND)
    broken = [{k: v.copy() for k, v in feed.items()} for feed in feeds]
    broken[1]["x"][3] = np.nan
    # The first round is skipped, with its slots; the second is as a first one.
    assert_close(made.run(broken).variables, expected(feeds[ROUND:]))


@pytest.mark.slow
def test_four_islands_go_on_as_one_and_one_as_four(tmp_path):
    four_of = {"mesh_shape": "all:4", "layout": "batch:all"}

    def build(**given):
        def make():
            opt = models.OPTIMIZERS["momentum"]()
            return gs.OuterOptimizer(opt, ROUND, outer_momentum=0.5, **four_of, **given)

        return harness.built("simd", *four_of.values(), models.train(make), batches(1)[0])

    four, one = build(), build(outer_dims=())
    for number, (first, then) in enumerate([(four, one), (one, four)]):
        before = ran(first, batches(ROUND), save=tmp_path / str(number))
        after = ran(then, [], tmp_path / str(number))
        for name in models.mlp_values():
            np.testing.assert_array_equal(after[name], before[name])
            np.testing.assert_array_equal(after[f"{name}/outer_momentum"],
                                          before[f"{name}/outer_momentum"])  # fmt: skip
            for held in (f"{name}/island", f"{name}_momentum_v/island"):
                mean = before[held] if first is one else np.mean(before[held], 0, dtype="d")
                np.testing.assert_allclose(
                    after[held], np.broadcast_to(mean, after[held].shape), rtol=1e-6, err_msg=held
                )
        assert after["OuterOptimizer/inner_step"] == ROUND


@pytest.mark.slow
def test_counters_inside_are_no_slots(mesh_kind):
    def skipping():
        opt = models.OPTIMIZERS["momentum"]()
        return gs.GradientAccumulationOptimizer(opt, 2, should_skip_update_fn=gs.skip_not_finite)

    made = built(mesh_kind, "two replicas", inner=skipping, leave_out_not_finite=True)
    feeds = batches(3)
    feeds[1]["x"][3] = np.nan
    found = made.run(feeds).variables
    counters = {k: v for k, v in found.items() if k.startswith("GradientAcc")}
    name = "GradientAccumulationOptimizer"
    assert counters == {f"{name}/mini_step": 0, f"{name}/update_step": 1, f"{name}/skipped": 1}
