"""skip_spikes against its rule in numpy: in stacks, over restarts, and in a training."""

import functools

import gin
import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference
from tests.sessions import session_of, train

SHAPE, LAYOUT, _ = harness.MESHES["2x2"]
AXES = {"mesh_shape": SHAPE, "layout": LAYOUT}
NAME = "GradientAccumulationOptimizer"
DEVIATIONS, ROWS = 4.0, 4
NAN, INF = np.nan, np.inf
# Of a step without data.
NOTHING = {"norm": 0.0, "loss": -INF}
STATE = {"norm": "norms", "loss": "losses"}


class Rule:
    """Which values of a series are spikes, in float64."""

    def __init__(self, window, nothing):
        self.window, self.nothing, self.values, self.row = window, nothing, [], 0

    def skips(self, value):
        few = max(2, self.window // 8)
        kept = self.values[-self.window :]
        mean, is_finite = np.mean(kept) if kept else 0.0, np.isfinite(value)
        limit = mean + DEVIATIONS * max(np.std(kept), 1e-4 * abs(mean)) if kept else 0.0
        has_data = value != self.nothing
        is_spike = has_data and len(self.values) >= few and not value <= limit
        row = self.row + bool(is_finite) if is_spike else 0
        self.value, self.row, self.begins = value, min(row, few), row > few and is_finite
        return has_data and (not is_finite or (is_spike and not self.begins))

    def taken(self):
        self.values = [] if self.begins else self.values
        self.row = 0
        self.values += [self.value] if self.value != self.nothing else []


class Rules:
    """The rules of islands, each with the norms and the losses that it sees."""

    def __init__(self, window, islands=1):
        self.of = {kind: [Rule(window, NOTHING[kind]) for _ in range(islands)] for kind in NOTHING}

    def skips(self, values):
        """Returns whether a step is skipped; `values` are each island's norm, and the loss."""
        *norms, loss = values
        pairs = [*zip(self.of["norm"], norms), *((rule, loss) for rule in self.of["loss"])]
        skip = any([rule.skips(value) for rule, value in pairs])
        for rule, _ in pairs:
            if not skip:
                rule.taken()
        return skip

    def restart(self, window, islands):
        if islands != len(self.of["norm"]):
            self.__init__(window, islands)
        for rules in self.of.values():
            for rule in rules:
                rule.values = rule.values[-min(rule.window, window) :]
                rule.row = rule.row if rule.window == window else 0
                rule.window = window

    def assert_kept(self, found):
        for kind, rules in self.of.items():
            ring, count = (
                found.get(name, found.get(f"{name}/island"))
                for name in (f"{NAME}/{STATE[kind]}", f"{NAME}/num_{STATE[kind]}")
            )
            for values, number, rule in zip(np.reshape(ring, (len(rules), -1)), count.flat, rules):
                kept = rule.values[-rule.window :]
                assert min(number, rule.window) == len(kept)
                np.testing.assert_allclose(
                    np.sort(values[: len(kept)]), np.sort(kept), rtol=1e-6, atol=1e-30
                )


def accumulation(window, passes=1, of=("norm", "loss"), accumulate="synced", **more):
    return gs.GradientAccumulationOptimizer(
        mtf.optimize.SgdOptimizer(0.0),
        passes,
        should_skip_update_fn=gs.skip_spikes(DEVIATIONS, window, of),
        accumulate=accumulate,
        **AXES,
        **more,
    )


STACKS = {
    "alone": accumulation,
    "islands": lambda window: gs.OuterOptimizer(accumulation(window), 4, **AXES),
    "clip": lambda window: gs.ClipByGlobalNormOptimizer(
        accumulation(window, accumulate="sharded"), 0.5
    ),
    "scale": lambda window: gs.LossScaleOptimizer(accumulation(window, 3), loss_scale=2.0**10),
    "loop": accumulation,
    "weights": functools.partial(accumulation, passes=2),
}
ISLANDS = {"islands": 2}


def program(stack, window):
    """Two variables of zeros, whose gradients are fed, and a loss that is fed."""

    def build(mesh, inputs):
        batch = mtf.Dimension("batch", ROWS)
        dims = {"w": [mtf.Dimension("inputs", 4), mtf.Dimension("hidden", 4)], "b": [], "loss": []}
        fed = {
            name: mtf.import_tf_tensor(mesh, inputs[f"of_{name}"], mtf.Shape([batch, *own]))
            for name, own in dims.items()
        }
        w, b = (
            mtf.get_variable(mesh, name, dims[name], initializer=tf.zeros_initializer())
            for name in "wb"
        )
        opt = STACKS[stack](window)

        def loss_of(fed):
            rows = mtf.Shape([fed["loss"].shape.dims[0]])
            each = fed["loss"] + mtf.reduce_sum(fed["w"] * w, output_shape=rows) + fed["b"] * b
            return {"loss": mtf.reduce_sum(each) * (1.0 / ROWS)}

        if stack == "loop":
            grads, _ = mtf.serialize_training_step(fed, loss_of, batch, 2)
            return opt.apply_grads(grads, mesh.graph.trainable_variables), {}
        loss, weight = loss_of(fed)["loss"], None
        if stack == "weights":
            weight = mtf.import_tf_tensor(mesh, inputs["of_weight"], mtf.Shape([]))
            loss = loss * weight / weight
        return opt.apply_gradients(opt.compute_gradients(loss, weights=weight)), {}

    return build


def feeds_of(series):
    """Returns feeds with given norms, of the first rows and the last rows, and losses."""
    rng, feeds = np.random.RandomState(0), []
    for *norms, loss in series:
        w, b = rng.randn(4, 4), rng.randn()
        norms = np.repeat(norms, ROWS // len(norms)) / np.sqrt(np.sum(w**2) + b**2)
        with np.errstate(invalid="ignore"):
            feed = {"w": np.multiply.outer(norms, w), "b": norms * b}
            feed["loss"] = loss * np.array([1.5, 0.5, 1.25, 0.75])  # of each example
        feed["weight"] = np.float64(loss != NOTHING["loss"])
        feeds.append({f"of_{name}": x.astype("f") for name, x in feed.items()})
    return feeds


@functools.lru_cache(maxsize=None)
def built(kind, stack, window):
    return harness.built(kind, SHAPE, LAYOUT, program(stack, window), feeds_of([(1.0, 0.0)])[0])


def usual(number, seed=3):
    rng = np.random.RandomState(seed)
    return [(rng.uniform(0.9, 1.1), rng.uniform(2.0, 2.2)) for _ in range(number)]


def changed(series, changes):
    return [changes.get(number, pair) for number, pair in enumerate(series)]


def scaled(series, norm, loss):
    return [(norm * x, loss * y) for x, y in series]


FIRST = changed(
    usual(40),
    {
        0: (NAN, NAN), 1: (INF, NAN), 12: (30.0, 2.1), 13: (NAN, NAN), 14: (1.0, 4.0),
        15: (1.0, NAN), 16: (1.0, INF), 25: (1e30, 1e30), 26: (0.0, 2.1), 30: (5.0, -40.0),
        35: (0.01, 2.1),
    },
)  # fmt: skip
RANDOM = np.random.RandomState(5)
SERIES = {
    # Not finite at first; spikes of either and of both; then another scale of one and of the other.
    "spikes": [*FIRST, *scaled(usual(8, 2), 100.0, 1.0), *scaled(usual(8, 3), 100.0, 7.0)],
    "small": scaled(FIRST, 1e-12, -1e-6),
    # Rounding makes no spike where nothing else differs.
    "constant": changed([(0.3, -0.7)] * 24, {20: (0.301, -0.7), 21: (0.3, -0.69)}),
    "zeros": changed([(0.0, 0.0)] * 12, {0: (1.0, 0.0), 10: (2.0, 0.0), 11: (0.0, 1e-20)}),
    "heavy tails": list(zip(np.exp(RANDOM.standard_t(2, 60)), RANDOM.standard_t(2, 60))),
}


def as_seen(series):
    """A gradient that is not finite makes the loss NaN, too."""
    return [(*norms, loss if np.isfinite(norms).all() else NAN) for *norms, loss in series]


def skipped_so_far(found):
    return int(np.max(found.get(f"{NAME}/skipped", found.get(f"{NAME}/skipped/island"))))


def assert_follows(kind, stack, series, window=8, seen=None):
    """Runs steps, and compares skips and what is kept with the rules.

    Returns the numbers of the steps that are skipped. `seen` are the values that the rules see, if
    these are not those of the series.
    """
    rules = Rules(window, ISLANDS.get(stack, 1))
    skips = [rules.skips(values) for values in seen or as_seen(series)]
    after = built(kind, stack, window).after_each(feeds_of(series))
    np.testing.assert_array_equal([skipped_so_far(x) for x in after], np.cumsum(skips))
    rules.assert_kept(after[-1])
    return set(np.flatnonzero(skips))


@pytest.mark.parametrize("kind", ["placement", "simd", "xla"])
@pytest.mark.mostly_slow(keep="simd")
def test_it_skips_what_the_rule_skips(kind):
    skips = {name: assert_follows(kind, "alone", series) for name, series in SERIES.items()}
    # The third step in a row on another scale begins anew.
    assert skips["spikes"] == {0, 1, 12, 13, 14, 15, 16, 25, 30, 40, 41, 48, 49}
    assert skips["constant"] == {20, 21}
    assert len(skips["heavy tails"]) > 5


WITHOUT_DATA = (NOTHING["norm"], NOTHING["loss"])
OTHERS = {
    # Norms are those before the clip: clipped ones are all alike.
    "clip": FIRST,
    # Of the last one, the gradients times the scale overflow.
    "scale": [*FIRST, (1e36, 2.1)],
    # The loss of all microbatches together.
    "loop": FIRST,
    "weights": changed(FIRST, dict.fromkeys((0, 5, 20), WITHOUT_DATA)),
    # Norms of different sizes, and spikes of one island, which the other one does not keep.
    "islands": [
        (x, 100.0 * y, loss)
        for (x, loss), (y, _) in zip(FIRST, changed(usual(40, 2), {22: (9.0, 0.0)}))
    ]
    + [(50.0 * x, (100.0 if n < 3 else 2e4) * x, loss) for n, (x, loss) in enumerate(usual(12))],
}


@pytest.mark.parametrize(("kind", "stack"), harness.pairs(["simd", "placement"], OTHERS))
@pytest.mark.mostly_slow(keep="simd")
def test_it_does_in_every_stack(kind, stack):
    series = OTHERS[stack]
    seen = [*as_seen(FIRST), (INF, 2.1)] if stack == "scale" else None
    assert len(assert_follows(kind, stack, series, seen=seen)) >= 7


def test_the_rounding_of_a_narrow_loss_is_no_spike():
    """The bfloat16 number after 2.0 is larger by almost a hundredth."""

    def build(mesh, inputs):
        w = mtf.get_variable(mesh, "w", [], initializer=tf.zeros_initializer())
        loss = mtf.import_tf_tensor(mesh, inputs["loss"], mtf.Shape([]))
        opt = accumulation(8, of="loss")
        return opt.minimize(mtf.cast(loss + w, tf.bfloat16)), {}

    feeds = [{"loss": np.float32(x)} for x in (2.0, 2.0, 2.0, 2.015625, 2.0, 2.0625, 2.0)]
    after = harness.built("simd", SHAPE, LAYOUT, build, feeds[0]).after_each(feeds)
    assert [skipped_so_far(x) for x in after] == [0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("kind", ["simd", pytest.param("placement", marks=pytest.mark.slow)])
def test_gradients_of_two_meshes_have_one_norm_and_one_loss(kind):
    def build(*meshes_and_inputs):
        *meshes, inputs = meshes_and_inputs
        grads, variables = [], []
        for number, mesh in enumerate(meshes):
            v = models.variable(mesh, f"v{number}", [])
            x = mtf.import_tf_tensor(mesh, inputs["of_b"], mtf.Shape([mtf.Dimension("batch", 4)]))
            loss = mtf.import_tf_tensor(mesh, inputs["of_loss"], x.shape)
            grads += mtf.gradients([mtf.reduce_mean(x * v + loss)], [v])
            variables.append(v.operation)
        opt = gs.GradientAccumulationOptimizer(
            mtf.optimize.SgdOptimizer(0.0),
            1,
            should_skip_update_fn=gs.skip_spikes(DEVIATIONS, 8, ("norm", "loss")),
        )
        return opt.apply_grads(grads, variables), {}

    feeds = [
        {"of_b": np.full(4, norm, "f"), "of_loss": np.full(4, loss, "f")} for norm, loss in FIRST
    ]
    made = harness.built(kind, SHAPE, LAYOUT, build, feeds[0], more_meshes=[(SHAPE, LAYOUT)])
    rules = Rules(8)
    series = [(2**0.5 * norm, 2 * loss) for norm, loss in as_seen(FIRST)]
    skips = [rules.skips(values) for values in series]
    after = made.after_each(feeds)
    np.testing.assert_array_equal([skipped_so_far(x) for x in after], np.cumsum(skips))
    rules.assert_kept(after[-1])


# Each other one on a placement mesh: where the window shrinks and grows, both.
RESTARTS = [
    (("alone", 16), ("alone", 16)),
    (("alone", 16), ("alone", 8)),
    (("islands", 16), ("islands", 8)),
    (("islands", 8), ("islands", 16)),
    (("alone", 8), ("alone", 16)),
    (("alone", 8), ("islands", 8)),
    (("islands", 8), ("alone", 8)),
]


@pytest.mark.parametrize(("kind", "restart"), harness.pairs(["simd", "placement"], RESTARTS))
@pytest.mark.mostly_slow(keep="simd")
def test_a_restart_goes_on_with_what_it_knew(kind, restart, tmp_path):
    """With the newest values, if the window is another one; with other islands it begins anew."""
    (before, after), path, skipped = restart, None, 0
    rules = Rules(before[1], ISLANDS.get(before[0], 1))
    first, then = usual(29, 2), changed(usual(12, 3), {1: (30.0, 2.1), 5: (1.0, 4.0)})
    for (stack, window), series in [(before, [*first, (50.0, 2.0)]), (after, then)]:
        rules.restart(window, islands := ISLANDS.get(stack, 1))
        series = [(*[norm] * islands, loss) for norm, loss in series]
        made = built(kind, stack, window)
        with session_of(made) as session:
            if path is not None:
                session.restore(path)
            assert skipped_so_far(session.variables()) == skipped
            train(made, session, feeds_of(series))
            path, found = session.save(str(tmp_path / "model")), session.variables()
        skipped += sum([rules.skips(values) for values in series])
        assert skipped_so_far(found) == skipped
        rules.assert_kept(found)


def test_norms_of_another_number_of_shards_begin_anew(tmp_path):
    """Of four shards' equal gradients the norm is half of that of their sum; of two, 0.7 of it."""

    def made(shards, how):
        where = {"mesh_shape": f"all:{shards}", "layout": "batch:all"}

        def build(mesh, inputs):
            rows, zeros = mtf.Shape([mtf.Dimension("batch", ROWS)]), tf.zeros_initializer()
            of_shard = mtf.get_variable(mesh, "copies", rows, initializer=zeros)
            w = mtf.get_variable(mesh, "w", [], initializer=zeros)
            x = mtf.import_tf_tensor(mesh, inputs["x"], rows)
            fn = gs.skip_spikes(DEVIATIONS, 8)
            opt = gs.GradientAccumulationOptimizer(
                mtf.optimize.SgdOptimizer(0.0), 1, should_skip_update_fn=fn, accumulate=how, **where
            )
            return opt.minimize(mtf.reduce_mean(x * (w + 0.001 * of_shard))), {}

        return harness.built("simd", *where.values(), build, feed)

    feed = {"x": np.ones(ROWS, "f")}
    first, kept = made(4, "local"), []
    with session_of(first) as session:
        train(first, session, [feed] * 6)
        path = session.save(str(tmp_path / "model"))
    for then in (first, made(2, "local"), made(4, "synced")):
        with session_of(then) as session:
            session.restore(path)
            train(then, session, [{"x": feed["x"] * NAN}, *[feed] * 4])
            found = session.variables()
        kept.append((skipped_so_far(found), int(found[f"{NAME}/num_norms"])))
    assert kept == [(1, 10), (1, 4), (1, 4)]


@pytest.mark.slow
def test_a_plain_saver_says_what_restores_another_window(tmp_path):
    with session_of(built("placement", "alone", 8)) as session:
        path = session.save(str(tmp_path / "model"))
    with session_of(built("placement", "alone", 16), tf.train.Saver) as session:
        with pytest.raises(ValueError, match="another window"):
            session.restore(path)


@pytest.mark.parametrize(
    ("kind", "where", "of"), [("simd", "local", "norm"), ("placement", "synced", "loss")]
)
@pytest.mark.slow
def test_a_training_with_ten_bad_batches_is_that_without_them(kind, where, of):
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

    fn = gs.skip_spikes(6.0, 32, of)
    values = harness.run(kind, SHAPE, LAYOUT, make(fn), feeds).variables
    assert values[f"{NAME}/skipped"] == 10
    expected = reference.train(reference.Sgd(0.02), good)
    without = harness.run(kind, SHAPE, LAYOUT, make(gs.skip_not_finite), feeds).variables
    reference.assert_close(values, expected, atol=1e-5)
    # So that it is not for nothing: the bad batches ruin a training that takes them.
    assert max(np.max(np.abs(without[n] - v)) for n, v in expected.items()) > 0.1


def test_it_is_named_and_counted(caplog):
    built("simd", "alone", 8).run(feeds_of([*usual(20), (30.0, 2.0)]))
    assert "microbatch step skipped" in caplog.text
    assert "should_skip_update_fn skip_spikes of norm and loss says so" in caplog.text


def test_a_training_of_nothing_but_nans_ends_by_name():
    def build(mesh, inputs):
        w = mtf.get_variable(mesh, "w", [], initializer=tf.zeros_initializer())
        opt = accumulation(8, of="norm", max_steps_without_update=3)
        return opt.minimize(w * mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([]))), {}

    with pytest.raises(gs.NoUpdateError, match="w"):
        harness.run("simd", SHAPE, LAYOUT, build, [{"x": np.float32(NAN)}] * 5)


def test_gradients_of_no_loss_are_refused_before_anything_is_built():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    w = mtf.get_variable(mesh, "w", [])
    grad = mtf.import_tf_tensor(mesh, tf.zeros([]), mtf.Shape([]))
    with harness.unchanged(mesh.graph), pytest.raises(ValueError, match="does not find the loss"):
        accumulation(8).apply_grads([grad], [w.operation])
    assert accumulation(8, of="norm").apply_grads([grad], [w.operation])


def test_gin_makes_it_and_describe_shows_it():
    gin.parse_config(
        """
        GradientAccumulationOptimizer.should_skip_update_fn = @skip_spikes()
        skip_spikes.of = ("norm", "loss")
        skip_spikes.window = 64
        """
    )
    try:
        opt = gs.GradientAccumulationOptimizer(mtf.optimize.SgdOptimizer(0.1), 2)
    finally:
        gin.clear_config()
    assert "skip steps by skip_spikes of norm and loss" in str(gs.describe(opt))
    assert gs.skip_spikes(of={"loss"}).of == ("loss",)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"deviations": 0.0}, "deviations"),
        ({"window": 7}, "window"),
        ({"window": 8.5}, "window"),
        ({"of": "losses"}, "of must be"),
        ({"of": ()}, "of must be"),
        ({"of": None}, "of must be"),
        ({"of": ("norm", "norm")}, "of must be"),
    ],
)
def test_bad_arguments(arguments, says):
    with pytest.raises(ValueError, match=says):
        gs.skip_spikes(**arguments)
