"""AdamWOptimizer against its formula in numpy float64, which is that of optax."""

import importlib.util

import gin
import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference
from tests.optimizers.outer import outer_reference
from tests.reference import AdamW
from tests.sessions import ran

SHAPE, LAYOUT, _ = harness.MESHES["2x2"]
AXES = {"mesh_shape": SHAPE, "layout": LAYOUT}
STEPS, RATE, DECAY, BETAS, EPSILON = 6, 0.02, 0.1, (0.8, 0.99), 1e-8
VARIABLES = {"dense/w": [("in", 6), ("hidden", 8)], "dense/bias": [("hidden", 8)], "scale": []}


def fed(name):
    return "gradient_of_" + name.replace("/", "_")


def given_gradients():
    """Of very different sizes; the first of "dense/bias" is always zero."""
    rng = np.random.RandomState(0)
    feeds = []
    for step in range(STEPS):
        feed = {k: rng.randn(*(n for _, n in dims)) * 10.0**-step for k, dims in VARIABLES.items()}
        feed["dense/bias"][0] = 0.0
        feeds.append({fed(k): np.asarray(v, "f") for k, v in feed.items()})
    return feeds


def first_values():
    rng = np.random.RandomState(1)
    return {k: np.asarray(rng.randn(*(n for _, n in dims)), "f") for k, dims in VARIABLES.items()}


def applied(make):
    """A `harness.Build` that applies gradients that are fed."""

    def build(mesh, inputs):
        variables, grads = [], []
        for name, dims in VARIABLES.items():
            shape = mtf.Shape([mtf.Dimension(*d) for d in dims])
            variables.append(models.variable(mesh, name, shape, first_values()[name]).operation)
            grads.append(mtf.import_tf_tensor(mesh, inputs[fed(name)], shape))
        return make(mesh).apply_grads(grads, variables), {}

    return build


def schedule(t):
    return RATE / (1.0 + t)


def by_updates(mesh):
    count = mtf.cast(gs.get_update_step(mesh, "adam"), tf.float32)
    return RATE / (count + 1.0)


@pytest.mark.mostly_slow
def test_six_updates(mesh_kind):
    def make(mesh):
        adam = gs.AdamWOptimizer(by_updates(mesh), DECAY, *BETAS, EPSILON, "bias$")
        return gs.CrossShardOptimizer(adam, **AXES)

    feeds = given_gradients()
    program = harness.built(mesh_kind, SHAPE, LAYOUT, applied(make), feeds[0])
    values = {k: v.astype(np.float64) for k, v in first_values().items()}
    adam = AdamW(schedule, DECAY, BETAS, EPSILON, spared=("bias",))
    sizes = {k: np.abs(v) for k, v in values.items()}
    for number, (feed, after) in enumerate(zip(feeds, program.after_each(feeds)), 1):
        grads = {k: feed[fed(k)].astype(np.float64) for k in values}
        values = adam(values, grads)
        for k, value in values.items():
            # Each step rounds the update, which is at most RATE, and the value, to 24 bits.
            sizes[k] = np.maximum(sizes[k], np.abs(value))
            bound = number * (RATE * 2**-20 + sizes[k] * 2**-24)
            assert np.all(np.abs(after[k] - value) <= bound), k
            np.testing.assert_allclose(after[f"{k}/adam_m"], adam.m[k], rtol=2e-6, atol=1e-9)
            np.testing.assert_allclose(after[f"{k}/adam_v"], adam.v[k], rtol=2e-6, atol=1e-12)
            assert after[f"{k}/adam_t"] == number
    assert set(after) == {
        *(f"{k}{slot}" for k in VARIABLES for slot in ("", "/adam_m", "/adam_v", "/adam_t")),
        "adam/update_step",
    }


@pytest.mark.parametrize("kind", ["placement", "shared"])
@pytest.mark.parametrize("in_pairs", [False, True])
def test_without_a_wrapper_it_writes_behind_all_reads(kind, in_pairs):
    (feed,) = models.mlp_batches(1)

    class InPairs(gs.AdamWOptimizer):
        def apply_grads(self, grads, variables):
            return [op for pair in zip(grads, variables) for op in self.apply_grad(*pair)]

    build = models.train(lambda: (InPairs if in_pairs else gs.AdamWOptimizer)(RATE))
    assert not harness.built(kind, SHAPE, LAYOUT, build, feed, may_race=True).races()


@pytest.mark.skipif(importlib.util.find_spec("optax") is None, reason="it compares with optax")
def test_the_formula_is_optaxs():
    import jax
    import optax

    values = {k: v.astype(np.float64) for k, v in first_values().items()}
    ours = AdamW(schedule, DECAY, BETAS, EPSILON, spared=("bias",))
    with jax.experimental.enable_x64():
        masked = {k: "bias" not in k for k in values}
        adamw = optax.adamw(
            schedule, *BETAS, EPSILON, weight_decay=DECAY, mask=lambda params: masked
        )
        theirs = dict(values)
        state = adamw.init(theirs)
        for feed in given_gradients():
            grads = {k: feed[fed(k)].astype(np.float64) for k in values}
            updates, state = adamw.update(grads, state, theirs)
            theirs = optax.apply_updates(theirs, updates)
            values = ours(values, grads)
            reference.assert_close(theirs, values, 1e-12, 0)


@pytest.mark.xla
def test_on_xla_devices():
    build = models.train(
        lambda: gs.CrossShardOptimizer(gs.AdamWOptimizer(0.01, DECAY, epsilon=1e-3))
    )
    feeds = models.mlp_batches(2)
    values = harness.run("xla", SHAPE, LAYOUT, build, feeds).variables
    expected = reference.train(AdamW(0.01, DECAY, epsilon=1e-3), feeds)
    reference.assert_close(values, expected, atol=2e-6)


@pytest.mark.slow
def test_islands_count_their_own_updates(mesh_kind, monkeypatch):
    """A skipped island restarts with slots of zeros, and so with the correction of a first step."""
    monkeypatch.setitem(reference.OPTIMIZERS, "adamw", lambda: AdamW(0.01, DECAY, epsilon=1e-3))
    feeds = models.mlp_batches(4)

    def make():
        adam = gs.AdamWOptimizer(0.01, DECAY, epsilon=1e-3)
        return gs.OuterOptimizer(adam, 2, 0.7, 0.5, leave_out_not_finite=True, **AXES)

    program = harness.built(mesh_kind, SHAPE, LAYOUT, models.train(make), feeds[0])
    expected = outer_reference.train("adamw", feeds, 2, 2, 0.7, 0.5, True, outer_reference.ALL)
    values = program.run(feeds).variables
    reference.assert_close(values, expected.outer, atol=3e-6)
    feeds[1]["x"][models.BATCH // 2] = np.nan  # the second island's
    after = program.after_each(feeds)
    assert [list(x["w1/adam_t/island"]) for x in after] == [[1, 1], [2, 0], [3, 1], [4, 2]]


def adam_session(make, path, steps, directory, has_step=True):
    """Makes steps on a weight whose gradient is half of it; returns variables and a checkpoint."""

    def build(mesh, inputs):
        step = tf.train.get_or_create_global_step() if has_step else None
        w = mtf.get_variable(mesh, "w", mtf.Shape([]), initializer=tf.ones_initializer())
        return make().apply_gradients([(w * 0.5, w.operation)], step), {}

    made, saved = harness.built("placement", *harness.ONE, build, {}), f"{directory}/model"
    return ran(made, [{}] * steps, path, saved), saved


def alone(opt):
    return gs.CrossShardOptimizer(opt)


def with_outer_steps(opt):
    return gs.OuterOptimizer(opt, 1, outer_learning_rate=1.0, outer_momentum=0.0, outer_dims=())


def accumulating(opt):
    return gs.GradientAccumulationOptimizer(opt, lambda step: 1)


@pytest.mark.parametrize("then", [alone, with_outer_steps, accumulating])
@pytest.mark.parametrize("first", [alone, with_outer_steps, accumulating])
@pytest.mark.mostly_slow(every=3)
def test_a_checkpoint_without_bias_correction_goes_on(first, then, tmp_path):
    """Its slots are means of many gradients, whose number is that of updates."""
    make = lambda: first(mtf.optimize.AdamWeightDecayOptimizer(0.1, 0.1, epsilon=1e-3))  # noqa: E731
    before, path = adam_session(make, None, 3, tmp_path)
    make = lambda: then(gs.AdamWOptimizer(0.1, 0.1, epsilon=1e-3))  # noqa: E731
    after, _ = adam_session(make, path, 1, tmp_path)
    end = "/island" if then is with_outer_steps else ""
    assert after[f"w/adam_t{end}"] == 4
    slots = "/island" if first is with_outer_steps else ""
    w, m, v = (before[k].astype("d") for k in ("w", f"w/adam_m{slots}", f"w/adam_v{slots}"))
    m, v = 0.9 * m + 0.1 * 0.5 * w, 0.999 * v + 0.001 * (0.5 * w) ** 2
    step = m / (1 - 0.9**4) / (np.sqrt(v / (1 - 0.999**4)) + 1e-3)
    np.testing.assert_allclose(after["w"], w - 0.1 * (step + 0.1 * w), rtol=0, atol=2e-6)


def test_the_number_of_updates_belongs_to_slots_that_are_taken_over(tmp_path):
    sgd = lambda: alone(mtf.optimize.SgdOptimizer(0.1))  # noqa: E731
    adam = lambda: alone(mtf.optimize.AdamWeightDecayOptimizer(0.1))  # noqa: E731
    _, without_slots = adam_session(sgd, None, 3, tmp_path / "sgd")
    _, without_steps = adam_session(adam, None, 3, tmp_path / "adam", has_step=False)
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        w = mtf.get_variable(mesh, "w", mtf.Shape([]), initializer=tf.ones_initializer())
        gs.AdamWOptimizer(0.1).apply_grads([w * 0.5], [w.operation])
        found = [
            tf.train.load_variable(gs.adapt_checkpoint(path, str(tmp_path)), "w/adam_t")
            for path in (without_slots, without_steps)
        ]
    # Of slots of an unknown number of gradients the first ones are over.
    assert found[0] == 0
    assert found[1] > 10**6


def test_gin_binds_it():
    with gin.unlock_config():
        gin.parse_config(
            "CrossShardOptimizer.opt = @AdamWOptimizer\n"
            "AdamWOptimizer.weight_decay_rate = 0.25\n"
            "AdamWOptimizer.exclude_from_weight_decay = ['bias', 'scale']"
        )
    try:
        made = gs.CrossShardOptimizer(learning_rate=0.5).opt
        assert (made.learning_rate, made.weight_decay_rate) == (0.5, 0.25)
        assert [made._decays(x) for x in ("w", "layer/bias", "scale")] == [True, False, False]
    finally:
        gin.clear_config()
