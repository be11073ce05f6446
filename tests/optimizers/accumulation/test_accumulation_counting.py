"""The microbatch steps that GradientAccumulationOptimizer counts: schedules, skipped steps."""

import functools
import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.accumulation import LOCAL, SYNCED
from tests import harness, models, reference
from tests.optimizers.accumulation.accumulation_runs import (
    STEPS,
    TOLERANCE,
    K,
    accumulate,
    assert_close,
    built,
    run,
    two_parameter_model,
)

SCHEDULES = {
    "number": (4, lambda step: 4),
    "python arithmetic": (lambda step: step + 1, lambda step: step + 1),
    "mtf": (
        lambda step: 1 + 2 * mtf.cast(mtf.greater(step, 1), tf.int32),
        lambda step: 3 if step > 1 else 1,
    ),
    "tf": (
        lambda step: tf.where(step < 2, tf.constant(2), tf.constant(3)),
        lambda step: 2 if step < 2 else 3,
    ),
    "constant function": (lambda step: 2, lambda step: 2),
}


@pytest.mark.parametrize(
    ("kind", "schedule", "average"),
    harness.on_both(
        harness.pairs(sorted(SCHEDULES), [False, True]),
        [("mtf", True), ("tf", False)],
    ),
)
@pytest.mark.mostly_slow
def test_schedules_equal_horovods_and_optaxs_rules(kind, schedule, average):
    passes, passes_of = SCHEDULES[schedule]
    feeds = models.mlp_batches(9)
    result = run(
        kind,
        "2",
        lambda: accumulate(
            models.OPTIMIZERS["momentum"](), "2", passes, average_aggregated_gradients=average
        ),
        feeds,
    )
    model = reference.Accumulation(reference.Momentum(), passes_of, average)
    # Two runs of values that momentum amplifies by up to 1 / (1 - 0.9).
    assert_close(result.variables, reference.train(model, feeds), 10 * TOLERANCE)
    counters = "GradientAccumulationOptimizer/"
    assert result.variables[counters + "mini_step"] == model.mini_step
    assert result.variables[counters + "update_step"] == model.update_step


def with_bad_steps(feeds, value):
    """Makes the inputs of one shard's rows bad in the second and fifth microbatch step."""
    for index in (1, 4):
        feeds[index]["x"] = feeds[index]["x"].copy()
        feeds[index]["x"][0, 0] = value
    return feeds


@pytest.mark.parametrize("place", [LOCAL, SYNCED])
@pytest.mark.mostly_slow
def test_a_microbatch_step_that_is_not_finite_is_skipped(mesh_kind, place):
    program = built(
        mesh_kind,
        "2",
        lambda: accumulate(
            models.OPTIMIZERS["sgd"](), "2", place=place,
            should_skip_update_fn=gs.skip_not_finite,
        ),
    )  # fmt: skip
    for bad in (np.nan, np.inf):
        feeds = with_bad_steps(models.mlp_batches(STEPS + 2), bad)
        values = program.run(feeds).variables
        model = reference.Accumulation(
            reference.Sgd(), K, skip=lambda grads: not reference.is_finite(grads)
        )
        with np.errstate(invalid="ignore"):
            expected = reference.train(model, feeds)
        assert model.skipped == values["GradientAccumulationOptimizer/skipped"] == 2
        assert model.update_step == values["GradientAccumulationOptimizer/update_step"] == 2
        assert_close(values, expected)


def test_without_a_skip_function_a_nan_stays_until_the_update():
    feeds = with_bad_steps(models.mlp_batches(STEPS), np.nan)[:K]
    program = built("placement", "2", lambda: accumulate(models.OPTIMIZERS["sgd"](), "2"))
    assert np.isnan(program.run(feeds).variables["w1"]).any()
    half = program.run(feeds[:2])
    np.testing.assert_array_equal(half.variables["w1"], models.mlp_values()["w1"])


@pytest.mark.mostly_slow
def test_large_updates_are_skipped(mesh_kind):
    feeds = models.mlp_batches(STEPS)
    feeds[1] = {k: 100 * v for k, v in feeds[1].items()}
    result = run(
        mesh_kind,
        "2",
        lambda: accumulate(
            models.OPTIMIZERS["sgd"](), "2", should_skip_update_fn=gs.skip_large_updates(10.0)
        ),
        feeds,
    )
    model = reference.Accumulation(
        reference.Sgd(), K, skip=lambda grads: reference.norm(grads) > 10
    )
    assert_close(result.variables, reference.train(model, feeds))
    assert model.skipped == result.variables["GradientAccumulationOptimizer/skipped"] == 1


@pytest.mark.parametrize("norm", [0, -1.0, float("nan")])
def test_bad_norm_to_skip(norm):
    with pytest.raises(ValueError, match="max_norm"):
        gs.skip_large_updates(norm)


def test_a_hint_when_the_inner_optimizer_counts_microbatch_steps(caplog):
    tf.train.get_or_create_global_step()
    with caplog.at_level(logging.INFO, "mtf_gradsync"):
        accumulate(mtf.optimize.AdafactorOptimizer(learning_rate=0.1), "2")
    (message,) = [r.getMessage() for r in caplog.records if "microbatch steps" in r.getMessage()]
    assert "decay_rate" in message
    caplog.clear()
    with caplog.at_level(logging.INFO, "mtf_gradsync"):
        accumulate(models.OPTIMIZERS["adafactor"](), "2")
        accumulate(models.OPTIMIZERS["sgd"](), "2")
    assert not caplog.records


def test_counters_are_readable():
    optimizer = accumulate(models.OPTIMIZERS["sgd"](), "2")
    assert optimizer.mini_step is optimizer.update_step is optimizer.skipped is None
    assert optimizer.progress_fields() == {}
    built("placement", "2", lambda: optimizer)
    names = {v.name.split("/")[-1] for v in optimizer.variables()}
    assert {"mini_step", "update_step", "skipped"} <= names
    assert sorted(optimizer.progress_fields()) == ["microbatch step", "update step"]


def test_counters_go_to_summaries():
    key = mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY
    made = built("placement", "2", lambda: accumulate(models.OPTIMIZERS["sgd"](), "2"))
    names = {name for name, _ in made.graph.get_collection(key)}
    prefix = "summary/GradientAccumulationOptimizer/"
    assert names == {prefix + n for n in ("mini_step", "update_step", "skipped")}


def test_the_update_step_is_one_counter_in_any_scope():
    mesh, weights, grads = two_parameter_model()
    with tf.variable_scope("schedule"):
        step = gs.get_update_step(mesh)
    optimizer = gs.GradientAccumulationOptimizer(mtf.optimize.SgdOptimizer(1.0), 2)
    with tf.variable_scope("training"):
        optimizer.apply_grads(grads, weights)
    assert optimizer.update_step.value is step
    assert optimizer.get_slot(weights[0], "gradient_accumulator") is not None


@pytest.mark.parametrize(
    "passes",
    [
        lambda step: 1 if step == 0 else 4,
        lambda step: {0: 1}.get(step, 4),
        lambda step: 2.5,
        lambda step: 0,
    ],
)
def test_schedules_that_cannot_work_are_refused(passes):
    mesh, weights, grads = two_parameter_model()
    optimizer = accumulate(mtf.optimize.SgdOptimizer(1.0), "2", passes)
    with harness.unchanged(mesh.graph), pytest.raises(ValueError, match="backward_passes_per_step"):
        optimizer.apply_grads(grads, weights)


@pytest.mark.parametrize("kept", ["a tensor", "the program's mesh"])
def test_a_schedule_may_keep_what_it_makes_in_its_first_call(kept):
    @functools.lru_cache(maxsize=None)
    def two():
        return tf.constant(2)

    def build(mesh, inputs):
        of_mesh = lambda step: gs.get_update_step(mesh) + 2  # noqa: E731
        passes = (lambda step: two()) if kept == "a tensor" else of_mesh
        w = mtf.get_variable(mesh, "w", [], initializer=tf.zeros_initializer())
        opt = accumulate(mtf.optimize.SgdOptimizer(1.0), None, passes, SYNCED)
        return opt.minimize(mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([])) * w), {}

    feeds = [{"x": np.float32(1.0)}] * 2
    after = harness.built("simd", "all:1", "", build, feeds[0]).after_each(feeds)
    assert [float(values["w"]) for values in after] == [0.0, -2.0]


def test_a_restored_sum_larger_than_asked_for_waits_for_a_step_that_counts():
    """mini_step 3 of 4, then 2 are asked for: a skipped step brings no update."""
    feeds = models.mlp_batches(5)
    feeds[3]["x"] = np.full_like(feeds[3]["x"], np.nan)
    passes = lambda step: 4 - 2 * step  # noqa: E731, 4, then 2, then 0, which counts as 1
    result = run(
        "placement",
        "2",
        lambda: accumulate(
            models.OPTIMIZERS["sgd"](), "2", passes, should_skip_update_fn=gs.skip_not_finite
        ),
        feeds,
    )
    counters = "GradientAccumulationOptimizer/"
    assert result.variables[counters + "update_step"] == 1
    assert result.variables[counters + "skipped"] == 1
