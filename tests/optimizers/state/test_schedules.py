"""Schedules that count updates."""

import functools
import logging

import gin
import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.schedules import adafactor_decay_rate_per_update, per_update, rate_at
from tests import harness, models, reference
from tests.wrappers import KINDS, wrap

K = 4


def evaluate(make, steps=range(12)):
    """The values of a tensor that follows the global step."""
    step = tf.train.get_or_create_global_step()
    value = make(step)
    results = []
    with tf.Session() as session:
        for number in steps:
            step.load(number, session)
            results.append(session.run(value))
    return results


def test_per_update_divides_step_and_length():
    seen = []

    def schedule(step, total_train_steps):
        seen.append((step, total_train_steps))
        return 0.5

    made = per_update([schedule, 3.0], K)
    assert [made(step=step, total_train_steps=103) for step in (0, 3, 4, 11)] == [1.5] * 4
    assert seen == [(0, 25), (0, 25), (1, 25), (2, 25)]
    assert functools.partial(made, total_train_steps=8)(step=7) == 1.5


def test_schedules_of_mesh_tensorflow():
    schedules = pytest.importorskip(
        "mesh_tensorflow.transformer.learning_rate_schedules", reason="needs the extra 'train'"
    )
    warmup = functools.partial(schedules.linear_warmup, steps_or_fraction=2)
    decay = functools.partial(schedules.linear_decay, steps_or_fraction=1.0)
    made = per_update([0.1, warmup, decay], K)
    rates = evaluate(lambda step: made(step=step.value(), total_train_steps=3 * K))
    # Updates 0, 1 and 2: warm-up 0, 1/2, 1; decay 1, 2/3, 1/3.
    np.testing.assert_allclose(rates, np.repeat([0, 0.1 / 3, 0.1 / 3], K), rtol=1e-6)
    # Of a run that ends before its first update, too.
    made = per_update([0.1, decay], K)
    rates = evaluate(lambda step: made(step=step.value(), total_train_steps=K - 1))
    np.testing.assert_allclose(rates[: K - 1], 0.1, rtol=1e-6)


def test_adafactors_decay_rate_is_mesh_tensorflows_at_the_update():
    both = evaluate(
        lambda step: [adafactor_decay_rate_per_update(K), mtf.optimize.adafactor_decay_rate_pow()]
    )
    mine, original = np.array(both).T
    np.testing.assert_array_equal(mine, np.repeat(original[:3], K))


def test_offset_counts_updates():
    at_offset = evaluate(lambda step: adafactor_decay_rate_per_update(K, offset=2), [8, 12])
    fresh = evaluate(lambda step: adafactor_decay_rate_per_update(K), [0, 4])
    np.testing.assert_array_equal(at_offset, fresh)


# Functions of the update step, and the same in numpy.
CHANGING = [
    (lambda step: mtf.minimum(8, step // 3 + 1), lambda step: min(8, step // 3 + 1)),
    (lambda step: tf.where(step < 5, 2, 7), lambda step: 2 if step < 5 else 7),
    (lambda step: step - 2, lambda step: max(1, step - 2)),  # below 1 counts as 1
    (lambda step: 3, lambda step: 3),
]


@pytest.mark.parametrize(("passes", "same"), CHANGING)
def test_per_update_takes_a_number_that_changes(passes, same):
    total, expected, made, left = 30, [], 0, same(0)
    for _ in range(total + 1):
        expected.append(made)
        left -= 1
        if left == 0:
            made += 1
            left = same(made)
    seen = []

    def schedule(step, total_train_steps):
        seen.append((step, total_train_steps))
        return step

    made = per_update(schedule, passes)
    assert [made(step, total) for step in range(total)] == expected[:total]
    assert {updates for _, updates in seen} == {expected[total]}
    rate = per_update(lambda step, _: tf.cast(step, tf.float32), passes)
    assert evaluate(lambda step: rate(step.value(), total), range(total + 1)) == expected
    with pytest.raises(ValueError, match="needs total_train_steps"):
        made(0)


def test_a_function_that_branches_in_python_is_refused():
    with pytest.raises(ValueError, match="Make it a function of one of these"):
        per_update(0.1, lambda step: 2 if step < 5 else 3)(0, 10)


@pytest.mark.parametrize("passes", [0, -1, 2.0, True, None, lambda step: 2])
def test_passes_must_be_a_number(passes):
    if not callable(passes):
        with pytest.raises(ValueError, match="backward_passes_per_step must be a whole number"):
            per_update(0.1, passes)
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        adafactor_decay_rate_per_update(passes)


@pytest.mark.parametrize("schedule", [None, "linear", [0.1, None]])
def test_schedule_must_be_callable_or_number(schedule):
    with pytest.raises(TypeError, match="schedule must be a function of step"):
        per_update(schedule, K)


def test_the_hint_about_microbatch_steps_goes_away(caplog):
    step = tf.train.get_or_create_global_step()
    rate = per_update(lambda step, total: 1.0 / (1.0 + tf.cast(step, tf.float32)), K)

    def wrap(**kwargs):
        caplog.clear()
        with caplog.at_level(logging.INFO, "mtf_gradsync"):
            gs.GradientAccumulationOptimizer(mtf.optimize.AdafactorOptimizer(**kwargs), K)
        return [
            r.getMessage() for r in caplog.records if "counts microbatch steps" in r.getMessage()
        ]

    assert wrap()
    assert not wrap(learning_rate=rate(step, 100), decay_rate=adafactor_decay_rate_per_update(K))


@pytest.mark.mostly_slow
def test_update_step_drives_the_rate_where_microbatch_steps_change(mesh_kind):
    """K goes from 1 to 3, and the rate is halved with each update."""
    shape, layout, batch_dims = harness.MESHES["2"]
    feeds = models.mlp_batches(7)

    def build(mesh, inputs):
        made = mtf.cast(gs.get_update_step(mesh), tf.float32)
        rate = 0.4 * mtf.pow(mtf.constant(mesh, 0.5, [], tf.float32), made)
        train = models.train(
            lambda: gs.GradientAccumulationOptimizer(
                mtf.optimize.SgdOptimizer(rate),
                lambda step: mtf.minimum(step * 2 + 1, 3),
                average_aggregated_gradients=True,
                mesh_shape=shape,
                layout=layout,
                batch_dims=batch_dims,
            )
        )
        operations, fetches = train(mesh, inputs)
        return operations, {**fetches, "rate": rate}

    result = harness.run(mesh_kind, shape, layout, build, feeds)
    np.testing.assert_allclose(
        [step["rate"] for step in result.fetched], [0.4, *[0.2] * 3, *[0.1] * 3], rtol=1e-6
    )
    values = {k: np.asarray(v, np.float64) for k, v in models.mlp_values().items()}
    for rate, part in ((0.4, feeds[:1]), (0.2, feeds[1:4]), (0.1, feeds[4:])):
        x, y = (np.concatenate([f[k] for f in part]).astype(np.float64) for k in ("x", "y"))
        grads = reference.mlp_grads(values, x, y)
        values = {k: v - rate * grads[k] for k, v in values.items()}
    # A few roundings each in 7 forward and backward passes over values of about 1.
    tolerance = 7 * 16 * np.finfo(np.float32).eps
    reference.assert_close(result.variables, values, tolerance)


def sgd(rate):
    return mtf.optimize.SgdOptimizer(rate)


class OneByOne:
    """Applies one pair at a time."""

    def __init__(self, opt):
        self.opt = gs.CrossShardOptimizer(opt)

    def apply_grads(self, grads, variables):
        return [op for pair in zip(grads, variables) for op in self.opt.apply_grad(*pair)]


SHARDS = {"mesh_shape": "b:2", "layout": "batch:b"}
NAN = float("nan")


def _wrap(stack, **given):
    return lambda opt: wrap(stack, opt, SHARDS, **given)


# Wrappers around an optimizer, and the gradients of their steps; 1 where there is no more to see.
COUNTED = {
    **{
        name: (_wrap(name, backward_passes_per_step=1), [1] * 8)
        for name in KINDS
        # A scalar has no parts, and islands make updates of their own.
        if name not in ("sharded", "islands")
    },
    "replicas": (
        _wrap("replicas", replicas_to_aggregate=2),
        [1, 1, NAN, 1, 1, 1, 1, 1],
    ),
    "loss_scale": (gs.LossScaleOptimizer, [1, 1, NAN, NAN, 1, 1, 1, 1]),
    "pairs": (OneByOne, [1] * 8),
    "another name": (
        lambda opt: gs.GradientAccumulationOptimizer(opt, 2, name="mine"),
        [0.5] * 8,
    ),
    "an update skipped in accumulation": (
        lambda opt: gs.GradientAccumulationOptimizer(gs.LossScaleOptimizer(opt), 2),
        [0.5, 0.5, NAN, 0.5, 0.5, 0.5, 0.5, 0.5],
    ),
}


def rates_follow_updates(make, asked_later=False):
    """A scalar w of 0 whose gradient is the mean of the inputs, by a rate of min(1, updates/4)."""

    def build(mesh, inputs):
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([mtf.Dimension("batch", 2)]))
        w = mtf.get_variable(mesh, "w", [], initializer=tf.zeros_initializer())
        rate = 1.0
        if not asked_later:
            made = mtf.cast(gs.get_update_step(mesh), tf.float32)
            rate = mtf.minimum(made * 0.25, mtf.constant(mesh, 1.0, []))
        grads = mtf.gradients([mtf.reduce_mean(x * w)], [w])
        operations = make(rate).apply_grads(grads, [w.operation])
        if asked_later:
            gs.get_update_step(mesh)
        return operations, {}

    return build


@pytest.mark.parametrize(
    ("mesh_kind", "name"),
    harness.on_both(zip(COUNTED), [("pairs",), ("replicas",), ("one island",), ("another name",)]),
    indirect=["mesh_kind"],
)
@pytest.mark.mostly_slow(every=5)
def test_the_update_step_counts_updates_under_every_wrapper(mesh_kind, name):
    wrap, gradients = COUNTED[name]
    feeds = [{"x": np.full([2], x, "f")} for x in gradients]
    build = rates_follow_updates(lambda rate: wrap(sgd(rate)))
    built = harness.built(mesh_kind, "b:2", "batch:b", build, feeds[0])
    found = built.after_each(feeds)
    passes = 2 if "accumulation" in name or name == "another name" else 1
    w, made, total, expected = 0.0, 0, 0.0, []
    for number, x in enumerate(gradients, 1):
        total += x
        if number % passes == 0:
            if np.isfinite(total):
                w -= min(1.0, made / 4) * total
                made += 1
            total = 0.0
        expected.append((w, made))
    counter = "GradientAccumulationOptimizer/update_step"
    np.testing.assert_array_equal([(v["w"], v[counter]) for v in found], expected)


def test_gin_names_the_counter_and_gives_it_as_a_function():
    with gin.unlock_config():
        gin.clear_config()
        try:
            gin.parse_config("import mtf_gradsync\nget_update_step.name = 'mine'")
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            gs.get_update_step(mesh)
        finally:
            gin.clear_config()
    assert "mine/update_step" in mesh.graph.name_to_variable


@pytest.mark.parametrize("kind", ["placement", "simd", pytest.param("xla", marks=pytest.mark.xla)])
@pytest.mark.mostly_slow
def test_the_rate_of_a_schedule_follows_updates(kind):
    """The first three of eight steps overflow: they are no steps of the schedule."""
    seen = []

    def schedule(step, total_train_steps):
        seen.append(total_train_steps)
        return 1.0 / (tf.cast(step, tf.float32) + 1.0)

    def build(mesh, inputs):
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([]))
        w = mtf.get_variable(mesh, "w", [], initializer=tf.zeros_initializer())
        rate = rate_at(schedule, gs.get_update_step(mesh), lambda: 5)
        opt = gs.LossScaleOptimizer(mtf.optimize.SgdOptimizer(rate))
        return opt.minimize(x * w), {"rate": rate}

    feeds = [{"x": np.float32(x)} for x in [np.inf] * 3 + [1] * 5]
    found = harness.run(kind, "b:2", "", build, feeds)
    rates = [float(np.ravel(step["rate"])[0]) for step in found.fetched]
    np.testing.assert_allclose(rates, [1, 1, 1, 1, 1 / 2, 1 / 3, 1 / 4, 1 / 5], rtol=1e-6)
    np.testing.assert_allclose(found.variables["w"], -sum(rates[3:]), rtol=1e-6)
    assert set(seen) == {5}


def test_a_counter_that_nothing_advances_is_an_error():
    feed = {"x": np.ones([2], "f")}
    for build in (
        rates_follow_updates(sgd),
        rates_follow_updates(lambda rate: gs.CrossShardOptimizer(sgd(rate)), asked_later=True),
    ):
        with pytest.raises(ValueError, match="call get_update_step before gradients are applied"):
            harness.built("simd", "b:2", "batch:b", build, feed)


def test_a_program_may_advance_the_counter_itself_or_only_read_it():
    def by_hand(mesh, inputs):
        operations, _ = rates_follow_updates(sgd)(mesh, inputs)
        step = gs.get_update_step(mesh)
        return [*operations, mtf.assign(step.operation, step + 2)], {}

    feeds = [{"x": np.ones([2], "f")}] * 2
    found = harness.run("simd", "b:2", "batch:b", by_hand, feeds)
    assert found.variables["w"] == -0.5
    assert found.variables["GradientAccumulationOptimizer/update_step"] == 4

    def evaluation(mesh, inputs):
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([mtf.Dimension("batch", 2)]))
        return [], {"loss": mtf.reduce_mean(x), "updates": gs.get_update_step(mesh)}

    assert harness.run("simd", "b:2", "batch:b", evaluation, feeds).fetched[0]["updates"] == 0
