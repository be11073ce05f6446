"""skip_spikes against its rule in numpy: alone, over restarts, and in a training."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference
from tests.sessions import session_of, train

SHAPE, LAYOUT, _ = harness.MESHES["2x2"]
AXES = {"mesh_shape": SHAPE, "layout": LAYOUT}
NAME = "GradientAccumulationOptimizer"


class Rule:
    """Which norms of a series are spikes, in float64."""

    def __init__(self, deviations, window):
        self.deviations, self.window, self.norms, self.row = deviations, window, [], 0

    def __call__(self, norm):
        few = max(2, self.window // 8)
        kept = self.norms[-self.window :]
        limit = np.mean(kept) + self.deviations * np.std(kept) if kept else 0
        is_spike = len(self.norms) >= few and not norm <= limit
        self.row = self.row + bool(np.isfinite(norm)) if is_spike else 0
        if self.row > few and np.isfinite(norm):
            self.norms, self.row, is_spike = [], 0, False
        if not np.isfinite(norm):
            return True
        if not is_spike:
            self.norms.append(norm)
        return is_spike


def applied(passes=1, deviations=3.0, window=16, more=()):
    """Applies gradients that are fed, of two variables."""

    def build(mesh, inputs):
        dims = {"w": [mtf.Dimension("inputs", 3), mtf.Dimension("hidden", 4)], "b": []}
        made = {n: mtf.get_variable(mesh, n, mtf.Shape(d)).operation for n, d in dims.items()}
        grads = [mtf.import_tf_tensor(mesh, inputs[f"of_{n}"], mtf.Shape(dims[n])) for n in dims]
        opt = gs.GradientAccumulationOptimizer(
            mtf.optimize.SgdOptimizer(0.0),
            passes,
            should_skip_update_fn=gs.skip_spikes(deviations, window),
            accumulate="synced",
            **AXES,
            **dict(more),
        )
        return opt.apply_grads(grads, list(made.values())), {}

    return build


def feeds_of(norms):
    rng = np.random.RandomState(0)
    feeds = []
    for norm in norms:
        w, b = rng.randn(3, 4), rng.randn()
        size = norm / np.sqrt(np.sum(w**2) + b**2)
        with np.errstate(invalid="ignore"):
            feeds.append({"of_w": (w * size).astype("f"), "of_b": np.float32(b * size)})
    return feeds


def a_series():
    """Usual norms, spikes, what is not finite, and another scale from some step on."""
    rng = np.random.RandomState(1)
    norms = list(rng.uniform(0.9, 1.1, 60))
    for step, norm in {1: 1.05, 20: 30.0, 21: np.nan, 30: np.inf, 40: 5.0, 59: 1e30}.items():
        norms[step] = norm
    return [*norms, *rng.uniform(90.0, 110.0, 20), *rng.uniform(0.9, 1.1, 5)]


@pytest.mark.parametrize("size", [1.0, pytest.param(1e-12, marks=pytest.mark.slow)])
def test_it_skips_what_the_rule_skips(mesh_kind, size):
    norms = [size * norm for norm in a_series()]
    feeds, rule = feeds_of(norms), Rule(3.0, 16)
    skips = [rule(norm) for norm in norms]
    # Five of the series, and the first step of the new scale.
    assert sum(skips) == 6
    program = harness.built(mesh_kind, SHAPE, LAYOUT, applied(), feeds[0])
    after = program.after_each(feeds)
    np.testing.assert_array_equal([x[f"{NAME}/skipped"] for x in after], np.cumsum(skips))
    kept = after[-1]
    assert kept[f"{NAME}/num_norms"] == len(rule.norms)
    np.testing.assert_allclose(np.sort(kept[f"{NAME}/norms"]), np.sort(rule.norms[-16:]), rtol=1e-6)


def test_a_restart_goes_on_with_what_it_knew(tmp_path):
    norms = [*np.random.RandomState(1).uniform(0.9, 1.1, 20), 30.0]
    feeds = feeds_of(norms)
    program = harness.built("placement", SHAPE, LAYOUT, applied(), feeds[0])
    with program.graph.as_default():
        saver, masters = tf.train.Saver(), {v.op.name: v for v in tf.global_variables()}
        for begin, end in [(0, 20), (20, 21)]:
            with program._session() as session:
                session.run(program.init)
                if begin:
                    saver.restore(session, f"{tmp_path}/model")
                session.run(program.restore)
                for feed in feeds[begin:end]:
                    session.run(program.updates, {program.inputs[k]: v for k, v in feed.items()})
                session.run(program.collect)
                skipped = session.run(masters[f"{NAME}/skipped"])
                saver.save(session, f"{tmp_path}/model")
    assert skipped == 1


@pytest.mark.parametrize("where", ["local", "synced"])
@pytest.mark.mostly_slow
def test_a_training_with_ten_bad_batches_is_that_without_them(mesh_kind, where):
    rng = np.random.RandomState(3)
    good, bad = models.mlp_batches(60, seed=5), models.mlp_batches(10, seed=6)
    at = sorted(rng.choice(np.arange(20, 60), 10, replace=False))
    feeds = list(good)
    for place, batch in reversed(list(zip(at, bad))):
        feeds.insert(place, {**batch, "y": batch["y"] * 1e3})

    def make(fn):
        def opt():
            place = {"accumulate": where, **(AXES if where == "local" else {})}
            return gs.GradientAccumulationOptimizer(
                mtf.optimize.SgdOptimizer(0.02), 1, should_skip_update_fn=fn, **place
            )

        return models.train(opt)

    values = harness.run(mesh_kind, SHAPE, LAYOUT, make(gs.skip_spikes(6.0, 32)), feeds).variables
    assert values[f"{NAME}/skipped"] == 10
    expected = reference.train(reference.Sgd(0.02), good)
    without = harness.run(mesh_kind, SHAPE, LAYOUT, make(gs.skip_not_finite), feeds).variables
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=0, atol=1e-5, err_msg=name)
    # So that it is not for nothing: the bad batches ruin a training that takes them.
    assert max(np.max(np.abs(without[n] - v)) for n, v in expected.items()) > 0.1


def test_it_is_named_and_counted(caplog, capfd):
    norms = [*np.random.RandomState(1).uniform(0.9, 1.1, 20), 30.0]
    feeds = feeds_of(norms)
    harness.run("simd", SHAPE, LAYOUT, applied(), feeds)
    assert "microbatch step skipped" in caplog.text
    assert "should_skip_update_fn skip_spikes says so" in caplog.text


@pytest.mark.parametrize("mesh_kind", ["placement", "simd"])
def test_islands_have_norms_of_their_own(mesh_kind):
    """The second island has gradients a hundred times as large, and then a spike."""
    rng = np.random.RandomState(2)
    batch, dim = mtf.Dimension("batch", 2), mtf.Dimension("inputs", 3)
    sizes = [[rng.uniform(0.9, 1.1), rng.uniform(90.0, 110.0)] for _ in range(12)]
    sizes[8] = [1.0, 5000.0]
    sizes[10] = [50.0, 100.0]  # less than the other island always has
    feeds = [{"x": np.outer(size, [1, 0, 0]).astype("f")} for size in sizes]

    def build(mesh, inputs):
        w = mtf.get_variable(mesh, "w", [dim], initializer=tf.zeros_initializer()).operation
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, dim]))
        place = {"mesh_shape": "islands:2", "layout": "batch:islands"}
        accumulated = gs.GradientAccumulationOptimizer(
            mtf.optimize.SgdOptimizer(0.1),
            1,
            should_skip_update_fn=gs.skip_spikes(6.0, 32),
            **place,
        )
        opt = gs.OuterOptimizer(accumulated, 4, **place)
        each = mtf.reduce_sum(x * w.value, output_shape=[batch])
        return opt.minimize(mtf.reduce_mean(each)), {}

    after = harness.built(mesh_kind, "islands:2", "batch:islands", build, feeds[0]).after_each(
        feeds
    )
    skipped = [
        int(np.max(x.get(f"{NAME}/skipped", x.get(f"{NAME}/skipped/island")))) for x in after
    ]
    assert skipped == [0] * 8 + [1, 1, 2, 2]
    found = after[-1][f"{NAME}/norms/island"]
    np.testing.assert_allclose(found[:, :8], np.transpose(sizes[:8]), rtol=1e-5)


@pytest.mark.parametrize(("before", "after"), [(16, 32), (32, 16), (16, 8)])
@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.mostly_slow(every=3)
def test_another_window_goes_on_with_the_newest_norms(kind, before, after, tmp_path):
    norms = list(np.random.RandomState(1).uniform(0.9, 1.1, 40))
    feeds = feeds_of([*norms, 30.0, 1.0])
    first, then = (
        harness.built(kind, SHAPE, LAYOUT, applied(window=window), feeds[0])
        for window in (before, after)
    )
    with session_of(first) as session:
        train(first, session, feeds[:40])
        path = session.save(str(tmp_path / "model"))
    with session_of(then) as session:
        session.restore(path)
        train(then, session, feeds[40:])
        found = session.variables()
    kept = [*norms[-min(before, after) :], 1.0][-after:]
    assert found[f"{NAME}/skipped"] == 1
    written = min(before, after) + 1
    assert found[f"{NAME}/num_norms"] == written
    # The next one replaces the oldest.
    order = (
        np.roll(found[f"{NAME}/norms"], -(written % after))
        if written > after
        else (found[f"{NAME}/norms"][:written])
    )
    np.testing.assert_allclose(order, kept, rtol=1e-5)


def test_a_plain_saver_says_what_restores_another_window(tmp_path):
    feed = feeds_of([1.0])[0]
    first, then = (
        harness.built("placement", SHAPE, LAYOUT, applied(window=window), feed)
        for window in (16, 32)
    )
    with session_of(first) as session:
        path = session.save(str(tmp_path / "model"))
    saver = tf.train.Saver
    with session_of(then, saver) as session, pytest.raises(ValueError, match="another window"):
        session.restore(path)


def test_a_training_of_nothing_but_nans_ends_by_name():
    feeds = feeds_of([np.nan] * 5)
    build = applied(more={"max_steps_without_update": 3})
    with pytest.raises((gs.NoUpdateError, tf.errors.InvalidArgumentError), match="b"):
        harness.run("simd", SHAPE, LAYOUT, build, feeds)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"deviations": 0.0}, "deviations"), ({"window": 7}, "window"), ({"window": 8.5}, "window")],
)
def test_bad_arguments(arguments, says):
    with pytest.raises(ValueError, match=says):
        gs.skip_spikes(**arguments)
