"""A strategy that keeps state: rounded gradients with error feedback, exactly as by hand."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import xla
from mtf_gradsync.runtimes.xla.runner import Step
from tests import harness
from tests.optimizers.pipeline.rounded_programs import (
    FEEDS,
    SHARDS,
    Program,
    cross_shard,
    rounding,
    sgd,
)
from tests.reduce import rounded

KINDS = ["placement", "simd"] + ([] if xla.why_no_xla() else ["xla"])


@pytest.fixture(scope="module")
def programs():
    made = {}

    def program(kind, mesh):
        if (kind, mesh) not in made:
            made[kind, mesh] = Program(kind, mesh, cross_shard)
        return made[kind, mesh]

    return program


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_fifty_steps_are_those_by_hand_and_restart_to_the_same_bits(kind, programs, tmp_path):
    reference = rounded.Reference(2)
    for feed in FEEDS:
        reference.apply(reference.send(feed))
    assert any(error.any() for error in reference.errors.values())
    program = programs(kind, "2x2")
    halfway = str(tmp_path / "halfway")
    program.run(FEEDS[:25], save=halfway)
    found = program.run(FEEDS[25:], restore=halfway)
    reference.check(found)
    whole = program.run(FEEDS)
    assert {k: v.tobytes() for k, v in found.items()} == {k: v.tobytes() for k, v in whole.items()}


@pytest.mark.slow
def test_it_moves_between_meshes_and_runtimes_with_the_sum_of_what_was_not_sent(programs, tmp_path):
    reference, path = rounded.Reference(4), None
    stations = zip(["4", "2x2", "one", "4"], ["simd", "placement", "placement", KINDS[-1]])
    for number, (mesh, kind) in enumerate(stations):
        reference.move(SHARDS[mesh])
        feeds, before = FEEDS[10 * number :][:10], path
        path = str(tmp_path / f"{number}")
        for feed in feeds:
            reference.apply(reference.send(feed))
        found = programs(kind, mesh).run(feeds, restore=before, save=path)
        reference.check(found)
    # All that the gradients were was applied, or waits on a core.
    for name, value in reference.values.items():
        total = sum(rounded.gradients(feed, 1)[name][0] for feed in FEEDS[:40])
        applied = (1 - value) / rounded.RATE
        np.testing.assert_array_equal(applied + reference.errors[name].sum(0), total)


def test_a_run_without_it_goes_on_with_nothing_unsent(programs, tmp_path):
    plain = Program("simd", "2x2", lambda mesh: gs.CrossShardOptimizer(sgd(), **mesh))
    saved, reference = str(tmp_path / "saved"), rounded.Reference(2)
    plain.run(FEEDS[:2], save=saved)
    for feed in FEEDS[:2]:
        reference.apply({k: g[0] for k, g in rounded.gradients(feed, 1).items()})
    reference.apply(reference.send(FEEDS[2]))
    reference.check(programs("simd", "2x2").run(FEEDS[2:3], restore=saved))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_inside_accumulation_it_changes_with_updates_alone(kind, tmp_path):
    def make(mesh):
        inner = gs.CrossShardOptimizer(sgd(), reducer=rounded.RoundedAllReduce())
        strategy = rounded.RoundedAllReduce()
        return gs.GradientAccumulationOptimizer(inner, 4, reducer=strategy, **mesh)

    program = Program(kind, "2x2", make)
    reference = rounded.Reference(2)
    for start in range(0, 12, 4):
        reference.apply(reference.send(*FEEDS[start : start + 4]))
    reference.check(program.run(FEEDS[:12]))
    saved = str(tmp_path / "saved")
    reference.check(program.run(FEEDS[:14], save=saved))
    reference.apply(reference.send(*FEEDS[12:16]))
    reference.check(program.run(FEEDS[14:16], restore=saved))


def not_finite(feed):
    return {name: np.full_like(value, np.nan) for name, value in feed.items()}


# All replicas of the second step are not finite: nothing of it is used, and no state of it kept.
# What the steps 0, 2, 3 and 4 make of the reference, where the 5th is in mid-accumulation.
def each_step(reference, feeds):
    for feed in feeds:
        reference.apply(reference.send(feed))


def two_reduced_steps(reference, feeds):
    for pair in (feeds[:2], feeds[2:]):
        reference.apply(*[reference.send(feed) for feed in pair])


def mean_of_two_steps(reference, feeds):
    for pair in (feeds[:2], feeds[2:]):
        reference.apply(reference.send(*pair), divisor=2)


def mean_of_two_reduced_steps(reference, feeds):
    for pair in (feeds[:2], feeds[2:]):
        reference.apply(*[reference.send(feed) for feed in pair], divisor=2)


STACKS = {
    "loss scale": (
        lambda mesh: gs.LossScaleOptimizer(
            gs.CrossShardOptimizer(sgd()), loss_scale=4.0, reducer=rounding(), **mesh
        ),
        each_step,
    ),
    "synced accumulation": (
        lambda mesh: gs.GradientAccumulationOptimizer(
            sgd(),
            2,
            accumulate="synced",
            should_skip_update_fn=gs.skip_not_finite,
            reducer=rounding(),
            **mesh,
        ),
        two_reduced_steps,
    ),
    "replicas": (
        lambda mesh: gs.SyncReplicasOptimizer(sgd(), 4, reducer=rounding(), **mesh),
        mean_of_two_steps,
    ),
    "around replicas": (
        lambda mesh: gs.ClipByGlobalNormOptimizer(
            gs.SyncReplicasOptimizer(sgd(), 4, accept_summed=True, **mesh),
            1e9,
            reducer=rounding(),
            **mesh,
        ),
        mean_of_two_reduced_steps,
    ),
    "loss scale inside accumulation": (
        lambda mesh: gs.GradientAccumulationOptimizer(
            gs.LossScaleOptimizer(sgd(), loss_scale=4.0, reducer=rounding()),
            2,
            reducer=rounding(),
            **mesh,
        ),
        # The first update is skipped with both of its steps; the fifth step waits.
        lambda reference, feeds: reference.apply(reference.send(*feeds[1:3])),
    ),
}


@pytest.mark.parametrize(
    ("kind", "stack"),
    harness.on_both([(name,) for name in STACKS], [("loss scale",), ("synced accumulation",)]),
)
@pytest.mark.mostly_slow
def test_steps_that_are_skipped_leave_it(kind, stack):
    make, follow = STACKS[stack]
    feeds = [FEEDS[0], not_finite(FEEDS[1]), *FEEDS[2:5]]
    reference = rounded.Reference(2)
    follow(reference, [feeds[0], *feeds[2:]])
    reference.check(Program(kind, "2", make).run(feeds))


@pytest.mark.parametrize("kind", ["placement", "shared copies", "simd"])
@pytest.mark.mostly_slow
def test_sharded_updates_inside_accumulation_get_parts_of_the_sums(kind, monkeypatch):
    def shared(mesh_shape, layout):
        return gs.placement_mesh_impl(mesh_shape, layout, [f"/device:CPU:{i}" for i in range(2)])

    if kind == "shared copies":
        monkeypatch.setattr(harness, "placement", shared)

    def make(mesh):
        opt = gs.ShardedUpdateOptimizer(sgd(), min_size=0, reducer=rounding(), **mesh)
        opt = gs.AverageOptimizer(opt, 0.5, **mesh)
        return gs.GradientAccumulationOptimizer(opt, 2, **mesh)

    reference = rounded.Reference(2)
    for pair in (FEEDS[:2], FEEDS[2:4]):
        reference.apply(reference.send(*pair))
    kind = "simd" if kind == "simd" else "placement"
    reference.check(Program(kind, "2", make).run(FEEDS[:5]))


@pytest.mark.xla
def test_an_exported_folder_takes_it_along(programs, tmp_path):
    made, saved = programs("simd", "2x2").built, str(tmp_path / "saved")
    programs("simd", "2x2").run(FEEDS[:3], save=saved)
    with made.graph.as_default():
        fetches = {"loss": made.fetched["loss"]}
        xla.export(made.program, made.lowering, fetches, tmp_path / "step", checkpoint=saved)
    step = Step.load(str(tmp_path / "step"))
    for feed in FEEDS[3:6]:
        step(feed)
    reference = rounded.Reference(2)
    each_step(reference, FEEDS[:6])
    reference.check(step.variables())
