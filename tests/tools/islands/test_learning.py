"""What islands learn together, on each runtime: against numpy in float64."""

import time
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.islands import Island, IslandHook, MergeSettings, Waiting
from mtf_gradsync.tools.islands.folder import Folder
from mtf_gradsync.tools.islands.journal import read_status
from mtf_gradsync.tools.islands.learning import Learning
from mtf_gradsync.tools.islands.versions import replay
from tests import models, reference
from tests.tools.islands.conftest import (
    BATCH,
    KINDS,
    D,
    Monitored,
    Program,
    at_once,
    batches,
    contributions,
    feed,
    line,
    merging,
)
from tests.tools.islands.toy import PLAIN, Toy, begun, merge, values_of


def test_counters_follow_a_version_and_a_counter_that_it_lacks_stays():
    learning = Learning({})
    # Since its contribution the island has made 3 steps and 2 updates.
    before, now = {"step": 10, "updates": 5}, {"step": 13, "updates": 7}
    assert learning.advance_counters({"step": 20}, now, before) == {"step": 23, "updates": 7}
    assert learning.advance_counters({"step": 1, "updates": 9}, now, before) == {
        "step": 13,
        "updates": 11,
    }
    assert learning.advance_counters({}, now, before) == now


# Weights count what was applied.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_contributions_are_of_what_was_applied_and_not_skipped(kind, folder):
    passes, inner = 3, 2

    def wrap(opt):
        skips = gs.skip_not_finite
        return gs.GradientAccumulationOptimizer(opt, passes, should_skip_update_fn=skips)

    program = Program(kind, "2", line(wrap), feed(0.5), folder, "a", inner, wait_seconds=60.0)
    rng, moves = np.random.RandomState(5), []
    for step in range(30):
        moves.append((float("nan") if rng.rand() < 0.3 else float(rng.randint(1, 9)), 2.0**step))
    # The model: an update applies the finite gradients of its steps, and their tokens.
    expected, w, waiting, now = [], 1.0, [], []
    for move, tokens in moves:
        if np.isfinite(move):
            waiting.append((move, tokens))
        if len(waiting) == passes:
            w -= sum(m for m, _ in waiting)
            now, waiting = [*now, sum(t for _, t in waiting)], []
            if len(now) == inner:
                expected, now = [*expected, (inner, sum(now))], []
    if now:
        expected.append((len(now), sum(now)))
    with program.session() as session, merging(folder, PLAIN, Waiting(min_grace=0.0)):
        program.island.begin(session)
        for move, tokens in moves:
            program.learn(session, feed(move), tokens)
        program.island.finish(session)
    assert contributions(folder) == {"a": expected}
    assert len(expected) > 2
    np.testing.assert_array_equal(values_of(folder, len(expected))["w"], np.full(6, w))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_a_step_that_the_loss_scale_skips_has_no_tokens(kind, folder):
    def wrap(opt):
        return gs.LossScaleOptimizer(opt)

    program = Program(kind, "2", line(wrap), feed(0.5), folder, "a", 2, wait="none")
    with program.begun(PLAIN) as session:
        for number, move in enumerate([1.0, float("inf"), 1.0]):
            program.learn(session, feed(move), 10.0**number)
        merge(folder, 1)
    assert contributions(folder) == {"a": [(2, 101.0)]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_synchronous_replicas_apply_the_tokens_of_several_steps(kind, folder):
    def wrap(opt):
        sync = gs.SyncReplicasOptimizer(opt, 4, 2, mesh_shape="all:2", layout="batch:all")
        step = tf.train.get_or_create_global_step()
        return SimpleNamespace(minimize=lambda loss: sync.minimize(loss, global_step=step))

    program = Program(kind, "2", line(wrap), feed(0.5), folder, "a", 2, wait="none")
    with program.begun(PLAIN) as session:
        for number in range(5):
            program.learn(session, feed(1.0), 10.0**number)
        merge(folder, 1)
    # An update takes the contributions of two steps; the fifth step waits for another.
    assert contributions(folder) == {"a": [(2, 1111.0)]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_an_exchange_takes_less_than_a_fifth_of_a_millisecond(kind, folder):
    def wrap(opt):
        return gs.GradientAccumulationOptimizer(gs.LossScaleOptimizer(opt), 4)

    program = Program(kind, "2", line(wrap), feed(0.5), folder, "a", 10**6, poll_seconds=60.0)
    with program.begun(PLAIN) as session:
        program.learn(session, feed(0.5))
        took = []
        for _ in range(300):
            began = time.perf_counter()
            program.island.after_step(session)
            took.append(time.perf_counter() - began)
    assert min(took) < 0.2e-3  # others may work on this machine


def test_a_stack_that_counts_needs_the_lowering(folder):
    def wrap(opt):
        return gs.GradientAccumulationOptimizer(opt, backward_passes_per_step=4)

    program = Program("simd", "2", line(wrap), feed(0.5), folder, "a", 6)
    with program.built.graph.as_default(), pytest.raises(ValueError, match="give the step's lower"):
        Island(str(folder), "b", 2)


# Numbers that are not finite.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opt", ["adam", "adafactor", "momentum"])
@pytest.mark.mostly_slow(every=3)
def test_slots_that_are_not_finite_begin_anew(kind, opt, folder, caplog):
    feeds = batches(5)
    bad = {k: np.full_like(v, np.nan) for k, v in feeds[0].items()}
    program = Program(kind, "2", opt, feeds[0], folder, "a", 1, wait="none")
    with program.begun(PLAIN) as session:
        begin = program.island._values.read(session)
        program.step(session, bad)
        program.step(session, feeds[4])  # momentum is behind by a step
        program.island.after_step(session)
        assert "goes back to version 0, and" in caplog.text
        for one in feeds[:2]:
            program.step(session, one)
        found = program.island._values.read(session)
    optimizer = reference.OPTIMIZERS[opt]()
    values = models.mlp_values()
    for name in values:
        np.testing.assert_array_equal(begin[name], values[name])
    for one in feeds[:2]:
        values = optimizer(values, reference.mlp_grads(values, one["x"], one["y"]))
    for name, value in values.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2 * 32 * 2**-24)


# What is not trained.


def with_mean(mesh, x, w):
    """A mean over batches, as batch normalization has it."""
    mean = mtf.get_variable(mesh, "mean", [D], initializer=tf.zeros_initializer(), trainable=False)
    batch = mtf.reduce_mean(x, output_shape=[D])
    return [mtf.assign(mean.operation, mean * 0.5 + batch * 0.5)]


def averaged(opt):
    return gs.AverageOptimizer(gs.CrossShardOptimizer(opt), 0.75)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_means_and_averages_are_exchanged(kind, folder):
    build = line(averaged, more=with_mean)
    made = [Program(kind, "2", build, feed(1.0), folder, n, 2, wait="none") for n in "ab"]
    average = "w/ExponentialMovingAverage"
    moves, tokens = ((0.5, 1.5, 0.25), (3.0, -1.0, 2.0)), (3.0, 1.0)
    state = [{"w": 1.0, "mean": 0.0, average: 1.0} for _ in made]

    def stepped(one, move):
        one["w"] -= move
        one["mean"] = (one["mean"] + move) / 2.0
        one[average] += 0.25 * (one["w"] - one[average])

    with made[0].session() as first, made[1].session() as second:
        sessions = [first, second]
        with merging(folder, MergeSettings(0.5, 0.5)):
            for program, session in zip(made, sessions):
                program.island.begin(session)
        names = set(made[0].island._values.specs)
        assert names == {"w", "mean:mean", f"mean:{average}"}
        for step in range(2):
            for number, (program, session) in enumerate(zip(made, sessions)):
                program.learn(session, feed(moves[number][step]), tokens[number])
                stepped(state[number], moves[number][step])
        merge(folder, 1, MergeSettings(0.5, 0.5), Waiting(quorum=2))
        mean = {k: np.average([s[k] for s in state], weights=tokens) for k in state[0]}
        # Trained ones by SGD with Nesterov's momentum; the others have what islands have.
        expected = {**mean, "w": 1.0 - 0.5 * 1.5 * (1.0 - mean["w"])}
        found = values_of(folder, 1)
        for name in names:
            np.testing.assert_allclose(
                found[name], expected[name.removeprefix("mean:")], rtol=0, atol=1e-6
            )
        # The islands have them, with what they have learned since: then a step on their own.
        for number, (program, session) in enumerate(zip(made, sessions)):
            before = dict(state[number])
            program.step(session, feed(moves[number][2]))
            stepped(state[number], moves[number][2])
            # A folder that was slow for a moment, on a busy machine, is looked at less often.
            program.island._exchange._next_look = 0.0
            program.island.after_step(session)
            found = program.island._values.read(session)
            for name in names:
                key = name.removeprefix("mean:")
                learned = state[number][key] - before[key]
                np.testing.assert_allclose(found[name], expected[key] + learned, rtol=0, atol=2e-6)
    assert Folder(str(folder)).names("momenta") == ["00000001.safetensors"]
    stored = Folder(str(folder)).load("momenta/00000001.safetensors").tensors
    assert set(stored) == {"w"}
    # One that joins begins with the version's.
    with merging(folder, MergeSettings(0.5, 0.5)):
        joins = Program(kind, "2", build, feed(1.0), folder, "c", 2)
        with joins.session() as session:
            joins.island.begin(session)
            found = joins.island._values.read(session)
            for name in names:
                key = name.removeprefix("mean:")
                np.testing.assert_allclose(found[name], expected[key], rtol=0, atol=1e-6)
            joins.step(session, feed(1.0))
            found = joins.island._values.read(session)
            expected_average = 0.75 * expected[average] + 0.25 * (expected["w"] - 1.0)
            np.testing.assert_allclose(
                found[f"mean:{average}"], expected_average, rtol=0, atol=1e-6
            )


# Narrow variables.


def test_versions_of_bfloat16_variables_are_float32(folder):
    settings, waiting = MergeSettings(0.7, 0.5), Waiting(quorum=4)
    toys = [Toy(folder, n, 1, wait="none", dtype=ml_dtypes.bfloat16) for n in "abcd"]
    for toy in toys:
        toy.session["b"] = np.array(1.0, ml_dtypes.bfloat16)
    with merging(folder, settings):
        for toy in toys:
            toy.begin()
    outer, velocity = 1.0, 0.0
    for _ in range(12):
        for number, toy in enumerate(toys):
            before = toy.session["b"]
            toy.step(2.0**-8 if number == 0 else 0.0)
            if number == 0:
                moved = float(before) - float(np.asarray(before - np.float32(2**-8)).astype(
                    ml_dtypes.bfloat16))  # fmt: skip
        merge(folder, 1, settings, waiting)
        gradient = moved / 4.0
        velocity = 0.5 * velocity + gradient
        outer -= 0.7 * (gradient + 0.5 * velocity)
        for toy in toys:  # take it
            toy.island._wait_and_take(toy.session, 0.0)
            assert toy.b == np.float32(outer).astype(ml_dtypes.bfloat16)
    found = values_of(folder, 12)["b"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, outer, rtol=0, atol=12 * 2**-24)
    assert round(float(found), 3) == 0.984
    assert Folder(str(folder)).load("momenta/00000012.safetensors").tensors["b"].dtype == "float32"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_an_island_of_bfloat16_variables_beside_one_of_float32(kind, folder):
    narrow = mtf.VariableDType(tf.bfloat16, tf.bfloat16, tf.float32)
    a = Program(kind, "2", line(gs.CrossShardOptimizer, narrow), feed(1.0), folder, "a", 1,
                wait="none")  # fmt: skip
    b = Program("simd", "2", line(gs.CrossShardOptimizer), feed(1.0), folder, "b", 1, wait="none")
    with a.session() as of_a, b.session() as of_b:
        with merging(folder, PLAIN):
            a.island.begin(of_a)
            b.island.begin(of_b)
        outer = 1.0
        for number in range(1, 4):
            a.step(of_a, feed(2.0**-7))
            b.step(of_b, feed(0.0))
            for program, session in ((a, of_a), (b, of_b)):
                program.island.after_step(session)
            merge(folder, 1, waiting=Waiting(quorum=2))
            # As far as a moves from the bfloat16 number that is next to the version.
            begin = np.float32(outer).astype(ml_dtypes.bfloat16)
            end = np.asarray(begin - np.float32(2**-7)).astype(ml_dtypes.bfloat16)
            outer -= (float(begin) - float(end)) / 2.0
            np.testing.assert_allclose(values_of(folder, number)["w"], outer, rtol=0, atol=2**-23)
            for program, session in ((a, of_a), (b, of_b)):
                program.island._wait_and_take(session, 0.0)
        found = a.island._values.read(of_a)["w"]
        assert (found.dtype, float(found[0])) == (
            ml_dtypes.bfloat16, float(np.float32(outer).astype(ml_dtypes.bfloat16)),
        )  # fmt: skip


# The furthest island, and schedules.


def test_the_furthest_island_begins(folder, caplog):
    fresh, far = Toy(folder, "a", 2, wait="none"), Toy(folder, "b", 2, wait="none")
    fresh.session["b"] = np.float32(1.0).reshape(())
    far.session["b"] = np.float32(3.0).reshape(())
    with merging(folder, PLAIN, Waiting(quorum=2)):
        at_once([lambda: fresh.begin(), lambda: far.begin(5000)])
    assert (fresh.b, far.b) == (3.0, 3.0)
    assert (fresh.island.step, far.island.step) == (5000, 5000)
    assert "a goes on from version 0, whose values take the place of its own of step 0" in (
        caplog.text
    )


def test_steps_follow_the_version(folder):
    one, two = begun(folder, ["one", "two"])
    one.steps(2, 1.0)
    two.step(1.0)
    two.island.finish(two.session, waits=False)
    merge(folder, 1, waiting=Waiting(quorum=2))
    joins = Toy(folder, "three", 2, wait="none").begin()
    own = Toy(folder, "four", 2, wait="none", follow="own").begin()
    # Those of the one that made most; a joiner goes on there.
    assert (joins.island.step, own.island.step) == (2, 0)
    one.step(0.0)
    assert one.island.step == 3
    for toy in (joins, own, one):
        toy.steps(2, 1.0)
    assert [toy.island.step for toy in (joins, own, one)] == [4, 2, 5]
    (decision,) = merge(folder, 1, waiting=Waiting(quorum=3))
    assert decision.counts["step"] == 4  # `one` contributed after its first step of two
    for toy in (joins, own, one):
        toy.step(0.0)
    assert [toy.island.step for toy in (joins, own, one)] == [5, 3, 6]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_schedules_and_counts_of_updates_follow_the_version(kind, folder):
    """The rate is a function of the global step, and of the updates of an accumulation."""

    def build(mesh, inputs):
        x = mtf.import_tf_tensor(mesh, inputs["x"], [BATCH, D])
        w = mtf.get_variable(mesh, "w", [D], initializer=tf.ones_initializer())
        loss = mtf.reduce_sum(x * w) / BATCH.size
        step = tf.train.get_or_create_global_step()
        rate = mtf.import_tf_tensor(
            mesh, 100.0 * tf.cast(step.read_value(), tf.float32), mtf.Shape([])
        )
        updates = gs.get_update_step(mesh)
        sgd = mtf.optimize.SgdOptimizer(rate + mtf.cast(updates, tf.float32))
        opt = gs.GradientAccumulationOptimizer(sgd, backward_passes_per_step=2)
        return opt.minimize(loss, global_step=step), {}

    made = [Program(kind, "2", build, feed(1.0), folder, n, 2, wait="none") for n in "ab"]
    with made[0].session() as of_a, made[1].session() as of_b:
        a, b = made
        with merging(folder, PLAIN):
            a.island.begin(of_a)
        w, rates = 1.0, []
        for step in range(4):
            a.learn(of_a, feed(1.0))
            if step % 2:
                rates.append(100.0 * step + step // 2)
                w -= 2.0 * rates[-1]
        merge(folder, 1)
        np.testing.assert_allclose(values_of(folder, 1)["w"], w, rtol=1e-6)
        with merging(folder, PLAIN):
            b.island.begin(of_b)
        assert b.island.step == 4
        for _ in range(2):
            b.learn(of_b, feed(1.0))
        w -= 2.0 * (100.0 * 5 + 2)
        found = b.island._values.read(of_b)
        np.testing.assert_allclose(found["w"], w, rtol=1e-6)
        assert [int(found[n]) for n in b.island._values.follows.values()] == [6, 3]


# Ends and new beginnings.


@pytest.mark.parametrize("fragments", [1, 2])
def test_all_that_is_left_is_contributed_at_the_end(folder, fragments):
    toy = Toy(folder, "one", 10, wait="none", wait_seconds=60.0)
    settings = PLAIN._replace(fragments=fragments)
    with merging(folder, settings, Waiting(min_grace=0.0), keep_all=True):
        toy.begin()
        toy.steps(19, 1.0)
        toy.island.finish(toy.session)
    values = values_of(folder, fragments=fragments)
    assert float(values["b"]) == 2.0 - 19.0
    assert float(values["a"][0, 0]) == -19.0
    if fragments == 1:
        assert sum(tokens for _, tokens in contributions(folder)["one"]) == 19.0
    assert replay(Folder(str(folder))) == []


def test_what_stays_without_a_merger_is_said(folder, caplog):
    (toy,) = begun(folder, ["one"])
    toy.island._wait_at_end = 0.0
    toy.steps(5, 1.0)
    toy.island.finish(toy.session)
    assert "learned from 5 tokens since version 0 waits to be merged" in caplog.text
    (row,) = read_status(Folder(str(folder))).rows
    assert row.state == "left"
    (last,) = [e for e in read_status(Folder(str(folder))).events if e["event"] == "left"]
    assert last["tokens_left"] == 0.0


def test_an_island_begins_again_after_its_end(folder):
    toy = Toy(folder, "one", 2, merge=True, merge_settings=PLAIN, wait_seconds=60.0)
    for part in range(3):
        toy.begin(toy.island.step if part else 0)
        toy.steps(4, 1.0)
        toy.island.finish(toy.session)
        assert toy.island.version == 2 * (part + 1)
    assert toy.b == 2.0 - 12.0
    (row,) = read_status(Folder(str(folder))).rows
    assert (row.joined, row.contributed, row.merged) == (3, 6, 6)


def test_a_monitored_session_that_recovers_begins_again(folder, tmp_path):
    """Its session is lost after step 5, and begins from a checkpoint of step 2."""
    program = Program("placement", "2", line(gs.CrossShardOptimizer), feed(1.0), folder, "one", 3,
                      wait="none")  # fmt: skip
    seen, lost = [], []

    class Session(tf.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            step = int(run_context.session.run(monitored.global_step))
            seen.append((step, program.island.step, program.island.version))
            if step == 2:
                run_context.session.run(program.built.collect)
                path = str(tmp_path / "model.ckpt")
                monitored.saver.save(run_context.session, path, monitored.global_step)
            if step == 5 and not lost:
                lost.append(True)
                raise tf.errors.AbortedError(None, None, "lost")

    with program.built.graph.as_default(), merging(folder, PLAIN, Waiting(min_grace=0.0)):
        monitored = Monitored(program)
        with monitored.session(tmp_path, [IslandHook(program.island), Session()]) as session:
            monitored.steps(session, [feed(1.0)] * 8)
    # Those that were made again, from the version: 3 steps are in it.
    assert [step for step, _, _ in seen] == [1, 2, 3, 4, 5, 3, 4, 5, 6]
    joined = [e for e in read_status(Folder(str(folder))).events if e["event"] == "joined"]
    assert [e["step"] for e in joined] == [0, 2]
    total = sum(tokens for _, tokens in contributions(folder)["one"])
    # What is in versions is what was contributed, and nothing that was restored.
    np.testing.assert_array_equal(values_of(folder)["w"], np.full(6, 1.0 - total))
