"""GradientAccumulationOptimizer: trajectories, schedules, skipping, state."""

import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._tf_compat import mtf, tf
from mtf_gradsync.optimizers.accumulation import LOCAL, SYNCED
from tests import harness, models, reference

EPS = np.finfo(np.float32).eps
K = 3
STEPS = 2 * K
# As for the trajectories of CrossShardOptimizer, with one more rounding a micro step.
TOLERANCE = STEPS * 16 * EPS


def accumulate(inner, mesh, passes=K, place=LOCAL, **kwargs):
    """The wrapper with the mesh, where it needs one."""
    if place == LOCAL:
        shape, layout, batch_dims = harness.MESHES[mesh]
        kwargs = dict(mesh_shape=shape, layout=layout, batch_dims=batch_dims, **kwargs)
    return gs.GradientAccumulationOptimizer(inner, passes, **kwargs)


def run(kind, mesh, make, feeds, **kwargs):
    shape, layout, batch_dims = harness.MESHES[mesh]
    return harness.run(kind, shape, layout, models.train(make, batch_dims), feeds, **kwargs)


def joined(feeds, size=K):
    """One big batch for each `size` micro batches."""
    return [
        {k: np.concatenate([f[k] for f in feeds[i : i + size]]) for k in feeds[0]}
        for i in range(0, len(feeds), size)
    ]


def assert_close(actual, expected, tolerance=TOLERANCE):
    for name in expected:
        np.testing.assert_allclose(
            actual[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


@pytest.mark.parametrize("optimizer", sorted(models.OPTIMIZERS))
@pytest.mark.parametrize(
    ("mesh", "place"),
    [("8", LOCAL), ("4x2", LOCAL), ("2x2x2", LOCAL), ("8", SYNCED), ("4x2", SYNCED)],
)
def test_mean_equals_one_batch_of_all_micro_batches(mesh_kind, mesh, optimizer, place):
    feeds = models.mlp_batches(STEPS)
    make = models.OPTIMIZERS[optimizer]
    result = run(
        mesh_kind,
        mesh,
        lambda: accumulate(make(), mesh, place=place, average_aggregated_gradients=True),
        feeds,
    )
    assert_close(result.variables, reference.train(optimizer, joined(feeds)))


@pytest.mark.parametrize("optimizer", sorted(models.OPTIMIZERS))
def test_mean_with_shuffled_cores(optimizer):
    feeds = models.mlp_batches(STEPS)
    make = models.OPTIMIZERS[optimizer]
    result = run(
        "simd",
        "4x2",
        lambda: accumulate(make(), "4x2", average_aggregated_gradients=True),
        feeds,
        logical_to_physical=harness.SHUFFLED,
    )
    assert_close(result.variables, reference.train(optimizer, joined(feeds)))


@pytest.mark.parametrize("wrap", ["around cross-shard", "alone", "three axes"])
@pytest.mark.parametrize("autostack", [True, False])
def test_sum_is_k_times_the_mean(mesh_kind, autostack, wrap):
    feeds = models.mlp_batches(STEPS)
    mesh = "2x2x2" if wrap == "three axes" else "4x2"

    def make():
        inner = mtf.optimize.SgdOptimizer(0.1 / K)
        inner = gs.CrossShardOptimizer(inner) if wrap == "around cross-shard" else inner
        return accumulate(inner, mesh)

    result = run(mesh_kind, mesh, make, feeds, autostack=autostack)
    assert_close(result.variables, reference.train("sgd", joined(feeds)))


def test_variables_and_slots_keep_their_bits_between_updates(mesh_kind):
    feeds = models.mlp_batches(K)
    make = lambda: accumulate(models.OPTIMIZERS["adam"](), "4x2")  # noqa: E731
    before = run(mesh_kind, "4x2", make, feeds[: K - 1]).variables
    after = run(mesh_kind, "4x2", make, feeds).variables
    for name, value in models.mlp_values().items():
        np.testing.assert_array_equal(before[name], value)
        assert not np.any(before[name + "/adam_m"])
        assert np.any(before[name + "/gradient_accumulator"])
        assert np.any(after[name] != value)
        assert np.any(after[name + "/adam_m"])
        assert not np.any(after[name + "/gradient_accumulator"])
    counters = "GradientAccumulationOptimizer/"
    assert [before[counters + n] for n in ("mini_step", "update_step")] == [K - 1, 0]
    assert [after[counters + n] for n in ("mini_step", "update_step")] == [0, 1]


@pytest.mark.parametrize("place", [LOCAL, SYNCED])
def test_one_pass_is_exactly_the_inner_optimizer(mesh_kind, place):
    feeds = models.mlp_batches(2)
    inner = lambda: gs.CrossShardOptimizer(models.OPTIMIZERS["adafactor"]())  # noqa: E731
    one = run(mesh_kind, "4x2", lambda: accumulate(inner(), "4x2", 1, place), feeds)
    bare = run(mesh_kind, "4x2", inner, feeds)
    assert sorted(one.variables) == sorted(bare.variables)
    for name, value in bare.variables.items():
        np.testing.assert_array_equal(one.variables[name], value)


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


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_schedules_equal_horovods_and_optaxs_rules(mesh_kind, schedule, average):
    passes, passes_of = SCHEDULES[schedule]
    feeds = models.mlp_batches(9)
    result = run(
        mesh_kind,
        "4x2",
        lambda: accumulate(
            models.OPTIMIZERS["momentum"](), "4x2", passes, average_aggregated_gradients=average
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
    """Makes the inputs of one shard's rows bad in the second and fifth micro step."""
    for index in (1, 4):
        feeds[index]["x"] = feeds[index]["x"].copy()
        feeds[index]["x"][0, 0] = value
    return feeds


@pytest.mark.parametrize("place", [LOCAL, SYNCED])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_micro_step_that_is_not_finite_is_left_out(mesh_kind, bad, place):
    feeds = with_bad_steps(models.mlp_batches(STEPS + 2), bad)
    result = run(
        mesh_kind,
        "4x2",
        lambda: accumulate(
            models.OPTIMIZERS["sgd"](), "4x2", place=place,
            should_skip_update_fn=gs.skip_not_finite,
        ),
        feeds,
    )  # fmt: skip
    model = reference.Accumulation(
        reference.Sgd(), K, skip=lambda grads: not all(np.isfinite(g).all() for g in grads.values())
    )
    with np.errstate(invalid="ignore"):
        expected = reference.train(model, feeds)
    assert model.skipped == result.variables["GradientAccumulationOptimizer/skipped"] == 2
    assert model.update_step == result.variables["GradientAccumulationOptimizer/update_step"] == 2
    assert_close(result.variables, expected)


def test_without_a_skip_function_a_nan_stays_until_the_update():
    feeds = with_bad_steps(models.mlp_batches(STEPS), np.nan)[:K]
    result = run("placement", "4x2", lambda: accumulate(models.OPTIMIZERS["sgd"](), "4x2"), feeds)
    assert np.isnan(result.variables["w1"]).any()
    half = run("placement", "4x2", lambda: accumulate(models.OPTIMIZERS["sgd"](), "4x2"), feeds[:2])
    np.testing.assert_array_equal(half.variables["w1"], models.mlp_values()["w1"])


def test_large_updates_are_left_out(mesh_kind):
    feeds = models.mlp_batches(STEPS)
    feeds[1] = {k: 100 * v for k, v in feeds[1].items()}
    result = run(
        mesh_kind,
        "4x2",
        lambda: accumulate(
            models.OPTIMIZERS["sgd"](), "4x2", should_skip_update_fn=gs.skip_large_updates(10.0)
        ),
        feeds,
    )

    def large(grads):
        return np.sqrt(sum(np.square(g).sum() for g in grads.values())) > 10

    model = reference.Accumulation(reference.Sgd(), K, skip=large)
    assert_close(result.variables, reference.train(model, feeds))
    assert model.skipped == result.variables["GradientAccumulationOptimizer/skipped"] == 1


def test_bfloat16_activations_add_up_in_float32(mesh_kind):
    """256 + 1 is 256 in bfloat16."""
    batch = mtf.Dimension("batch", 8)
    feeds = [{"x": np.full(8, v, "f")} for v in (32.0, 0.125, 0.125, 0.125)]
    dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)

    def build(mesh, inputs):
        x = mtf.import_tf_tensor(mesh, tf.cast(inputs["x"], tf.bfloat16), mtf.Shape([batch]))
        w = mtf.get_variable(mesh, "w", mtf.Shape([]), dtype, initializer=tf.zeros_initializer())
        optimizer = accumulate(mtf.optimize.SgdOptimizer(1.0), "8", 4)
        operations = optimizer.minimize(mtf.reduce_sum(x * w))
        (accumulator,) = [v for v in optimizer.variables() if "accumulator" in v.name]
        assert accumulator.slice_dtype == tf.float32
        return operations, {}

    result = harness.run(mesh_kind, "all:8", "batch:all", build, feeds)
    assert float(result.variables["w"]) == -259.0


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, "bfloat16"])
def test_accumulator_dtype(dtype):
    result = run(
        "placement",
        "4x2",
        lambda: accumulate(models.OPTIMIZERS["sgd"](), "4x2", accumulator_dtype=dtype),
        models.mlp_batches(1),
    )
    expected = tf.as_dtype(dtype).as_numpy_dtype
    assert result.variables["w1/gradient_accumulator"].dtype == expected


def test_local_accumulators_take_one_slice_a_core():
    result = run(
        "placement", "4x2", lambda: accumulate(models.OPTIMIZERS["sgd"](), "4x2"),
        models.mlp_batches(1), autostack=False,
    )  # fmt: skip
    laid_out = {v.name: x for v, x in result.lowering.variables.items()}
    for name in models.mlp_values():
        weight = laid_out[name].laid_out_tensor.slice_shape
        assert laid_out[name + "/gradient_accumulator"].laid_out_tensor.slice_shape == [1, *weight]


def test_gradients_that_are_none_stay_none(mesh_kind):
    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs)
        variables = list(mesh.graph.trainable_variables)
        grads = mtf.gradients([loss], [v.value for v in variables])
        grads[0] = None
        optimizer = accumulate(models.OPTIMIZERS["sgd"](), "4x2", 2)
        return optimizer.apply_grads(grads, variables), {}

    shape, layout, _ = harness.MESHES["4x2"]
    result = harness.run(mesh_kind, shape, layout, build, models.mlp_batches(2))
    assert "w1/gradient_accumulator" not in result.variables
    np.testing.assert_array_equal(result.variables["w1"], models.mlp_values()["w1"])
    assert np.any(result.variables["b1"] != models.mlp_values()["b1"])


@pytest.mark.parametrize("kind_of_step", ["mtf", "tf"])
def test_global_step_advances_on_every_micro_step(mesh_kind, kind_of_step):
    def build(mesh, inputs):
        if kind_of_step == "tf":
            step = tf.train.get_or_create_global_step()
        else:
            step = mtf.get_variable(
                mesh, "global_step", mtf.Shape([]), tf.int32, trainable=False,
                initializer=tf.zeros_initializer(),
            )  # fmt: skip
        optimizer = accumulate(models.OPTIMIZERS["sgd"](), "4x2")
        return optimizer.minimize(models.mlp_loss(mesh, inputs), step), {}

    shape, layout, _ = harness.MESHES["4x2"]
    result = harness.run(mesh_kind, shape, layout, build, models.mlp_batches(4))
    assert result.variables["global_step"] == 4


def test_a_learning_rate_can_follow_the_update_step(mesh_kind):
    """The counter exists before the inner optimizer, under the wrapper's name."""
    feeds = models.mlp_batches(STEPS)

    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs)
        step = gs.get_update_step(mesh)
        lr = 0.1 / (1.0 + mtf.cast(step, tf.float32))
        optimizer = accumulate(mtf.optimize.SgdOptimizer(lr), "4x2")
        operations = optimizer.minimize(loss)
        assert optimizer.update_step.value is step
        return operations, {}

    shape, layout, _ = harness.MESHES["4x2"]
    result = harness.run(mesh_kind, shape, layout, build, feeds)

    class Decaying(reference.Sgd):
        updates = 0

        def __call__(self, values, grads):
            self.updates += 1
            return super().__call__(values, {k: g / self.updates for k, g in grads.items()})

    model = reference.Accumulation(Decaying(), K)
    assert_close(result.variables, reference.train(model, feeds))


class TestComposition:
    """With the other stages."""

    def test_microbatches_inside_a_micro_step(self, mesh_kind):
        feeds = models.mlp_batches(4)

        def build(mesh, inputs):
            batch = mtf.Dimension("batch", models.BATCH)
            d = mtf.Dimension("in", models.INPUTS)
            x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, d]))
            start = tf.constant_initializer(np.full(models.INPUTS, 0.5, "f"))
            w = mtf.get_variable(mesh, "w", mtf.Shape([d]), initializer=start)
            grads, _ = mtf.serialize_training_step(
                {"x": x}, lambda f: {"loss": mtf.reduce_sum(mtf.square(f["x"] * w))}, batch, 2
            )
            optimizer = accumulate(mtf.optimize.SgdOptimizer(0.001), "4x2", 2)
            return optimizer.apply_grads(grads, mesh.graph.trainable_variables), {}

        shape, layout, _ = harness.MESHES["4x2"]
        w = harness.run(mesh_kind, shape, layout, build, feeds).variables["w"]
        expected = np.full(models.INPUTS, 0.5)
        for big in joined(feeds, 2):
            expected = expected - 0.001 * 2 * expected * np.square(big["x"].astype(float)).sum(0)
        np.testing.assert_allclose(w, expected, rtol=64 * EPS)

    def test_clipping_per_shard_and_micro_step_and_globally_per_update(self, mesh_kind):
        feeds = models.mlp_batches(4)
        shard_norm, update_norm = 0.1, 0.15

        def build(mesh, inputs):
            loss = models.mlp_loss(mesh, inputs)
            variables = list(mesh.graph.trainable_variables)
            grads = mtf.gradients([loss], [v.value for v in variables])
            axes = gs.ReplicaAxes(*harness.MESHES["4x2"][:2])
            clipped, _ = gs.clip_by_shard_norm(grads, shard_norm, axes)
            inner = gs.ClipByGlobalNormOptimizer(models.OPTIMIZERS["sgd"](), update_norm)
            optimizer = gs.GradientAccumulationOptimizer(inner, 2, axes=axes)
            return optimizer.apply_grads(clipped, variables), {}

        shape, layout, _ = harness.MESHES["4x2"]
        result = harness.run(mesh_kind, shape, layout, build, feeds)

        def norm(grads):
            return np.sqrt(sum(np.square(g).sum() for g in grads.values()))

        values = {k: np.asarray(v, float) for k, v in models.mlp_values().items()}
        for start in (0, 2):
            total = {k: 0.0 for k in values}
            for feed in feeds[start : start + 2]:
                for rows in range(0, models.BATCH, 4):
                    part = {k: v[rows : rows + 4].astype(float) for k, v in feed.items()}
                    grads = reference.mlp_grads(values, part["x"], part["y"])
                    grads = {k: g / 4 for k, g in grads.items()}  # a quarter of the mean
                    factor = min(1, shard_norm / norm(grads))
                    total = {k: total[k] + factor * grads[k] for k in total}
            factor = min(1, update_norm / norm(total))
            assert factor < 1
            values = {k: values[k] - 0.1 * factor * total[k] for k in values}
        assert_close(result.variables, values)

    @pytest.mark.parametrize("place", [LOCAL, SYNCED])
    def test_groups_of_own_copies(self, mesh_kind, place):
        groups = [[3, 0], [1, 2]]
        dims = [mtf.Dimension("batch", 4), mtf.Dimension("d", 3)]
        grads = np.random.RandomState(0).randn(4, 4, 3).astype("f")

        def build(mesh, inputs):
            w = mtf.get_variable(mesh, "w", mtf.Shape(dims), initializer=tf.zeros_initializer())
            grad = mtf.import_tf_tensor(mesh, inputs["g"], mtf.Shape(dims))
            inner = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.5), group_assignment=groups)
            optimizer = accumulate(inner, "4x2", 2, place)
            return optimizer.apply_grads([grad], [w.operation]), {}

        shape, layout, _ = harness.MESHES["4x2"]
        feeds = [{"g": g} for g in grads]
        w = harness.run(mesh_kind, shape, layout, build, feeds).variables["w"]
        total = grads.sum(0, dtype=float)
        expected = np.empty((4, 3))
        for group in groups:
            expected[group] = -0.5 * total[group].sum(0)
        np.testing.assert_allclose(w, expected, rtol=16 * EPS, atol=16 * EPS)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"backward_passes_per_step": 0}, ValueError, "backward_passes_per_step.*0"),
        ({"backward_passes_per_step": -2}, ValueError, "backward_passes_per_step.*-2"),
        ({"backward_passes_per_step": 1.5}, ValueError, "backward_passes_per_step.*1.5"),
        ({"backward_passes_per_step": True}, ValueError, "backward_passes_per_step"),
        ({"backward_passes_per_step": "4"}, ValueError, "backward_passes_per_step"),
        ({"accumulator_dtype": tf.int32}, ValueError, "accumulator_dtype.*int32"),
        ({"accumulator_dtype": "wide"}, ValueError, "accumulator_dtype.*wide"),
        ({"accumulate": "here"}, ValueError, "accumulate.*'here'"),
        ({"accumulate": "local"}, ValueError, "mesh_shape and layout"),
        ({"should_skip_update_fn": 3}, TypeError, "should_skip_update_fn.*3"),
        ({"should_skip_update_fn": gs.skip_large_updates}, TypeError, "should_skip_update_fn"),
        (
            {"opt": gs.GradientAccumulationOptimizer(mtf.optimize.SgdOptimizer(1), 2)},
            ValueError,
            "product of both",
        ),
    ],
)
def test_bad_arguments(arguments, error, words):
    arguments = {"opt": mtf.optimize.SgdOptimizer(1), "backward_passes_per_step": 2, **arguments}
    with pytest.raises(error, match=words):
        gs.GradientAccumulationOptimizer(**arguments)


@pytest.mark.parametrize("norm", [0, -1.0, float("nan")])
def test_bad_norm_to_skip(norm):
    with pytest.raises(ValueError, match="max_norm"):
        gs.skip_large_updates(norm)


def test_sums_over_the_shards_belong_inside_of_local_accumulation():
    inner = accumulate(mtf.optimize.SgdOptimizer(1), "4x2")
    with pytest.raises(ValueError, match=r"GradientAccumulationOptimizer\(CrossShardOptimizer"):
        gs.CrossShardOptimizer(inner)


def test_a_hint_when_the_inner_optimizer_counts_micro_steps(caplog):
    tf.train.get_or_create_global_step()
    with caplog.at_level(logging.INFO, "mtf_gradsync"):
        accumulate(mtf.optimize.AdafactorOptimizer(learning_rate=0.1), "4x2")
    (message,) = [r.getMessage() for r in caplog.records if "micro steps" in r.getMessage()]
    assert "decay_rate" in message
    caplog.clear()
    with caplog.at_level(logging.INFO, "mtf_gradsync"):
        accumulate(models.OPTIMIZERS["adafactor"](), "4x2")
        accumulate(models.OPTIMIZERS["sgd"](), "4x2")
    assert not caplog.records


def test_counters_are_readable():
    optimizer = accumulate(models.OPTIMIZERS["sgd"](), "4x2")
    assert optimizer.mini_step is optimizer.update_step is optimizer.skipped is None
    assert optimizer.progress_fields() == {}
    run("placement", "4x2", lambda: optimizer, models.mlp_batches(1))
    names = {v.name.split("/")[-1] for v in optimizer.variables()}
    assert {"mini_step", "update_step", "skipped"} <= names
    assert sorted(optimizer.progress_fields()) == ["micro step", "update step"]


def test_counters_go_to_summaries():
    key = mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY
    result = run(
        "placement", "4x2", lambda: accumulate(models.OPTIMIZERS["sgd"](), "4x2"),
        models.mlp_batches(1),
    )  # fmt: skip
    names = {name for name, _ in result.graph.get_collection(key)}
    prefix = "summary/GradientAccumulationOptimizer/"
    assert names == {prefix + n for n in ("mini_step", "update_step", "skipped")}


def two_parameter_model(dtype=tf.float32):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    shape = mtf.Shape([mtf.Dimension("d", 2)])
    weights = [
        mtf.get_variable(mesh, n, shape, dtype, initializer=tf.ones_initializer()).operation
        for n in ("v", "w")
    ]
    return mesh, weights, [mtf.ones(mesh, shape, dtype) for _ in weights]


def test_two_wrappers_in_one_graph_need_two_names():
    _, weights, grads = two_parameter_model()
    one, two, three = (
        gs.GradientAccumulationOptimizer(mtf.optimize.SgdOptimizer(1.0), 2, name=name)
        for name in ("one", "one", "three")
    )
    one.apply_grads(grads[:1], weights[:1])
    with pytest.raises(ValueError, match=r"share their counters.*name="):
        two.apply_grads(grads[1:], weights[1:])
    three.apply_grads(grads[1:], weights[1:])


def test_one_wrapper_serves_several_graphs():
    optimizer = accumulate(mtf.optimize.SgdOptimizer(0.1), "4x2")
    results = [run("placement", "4x2", lambda: optimizer, models.mlp_batches(K)) for _ in range(2)]
    np.testing.assert_array_equal(results[0].variables["w1"], results[1].variables["w1"])


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
    before = list(mesh.graph.operations), list(mesh.graph.all_variables)
    optimizer = accumulate(mtf.optimize.SgdOptimizer(1.0), "8", passes)
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        optimizer.apply_grads(grads, weights)
    assert (list(mesh.graph.operations), list(mesh.graph.all_variables)) == before


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adafactor"])
def test_bfloat16_activations_with_every_optimizer_that_takes_them(mesh_kind, optimizer):
    """Mesh-TF's AdamWeightDecay does not, with weight decay, with or without a wrapper."""
    batch, d = mtf.Dimension("batch", 8), mtf.Dimension("d", 4)
    feeds = [{"x": f["x"][:8, :4]} for f in models.mlp_batches(4)]
    dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)

    def build(mesh, inputs):
        x = mtf.import_tf_tensor(mesh, tf.cast(inputs["x"], tf.bfloat16), mtf.Shape([batch, d]))
        w = mtf.get_variable(mesh, "w", mtf.Shape([d]), dtype, initializer=tf.ones_initializer())
        inner = models.OPTIMIZERS[optimizer]()
        return accumulate(inner, "8", 2).minimize(mtf.reduce_sum(x * w)), {}

    w = harness.run(mesh_kind, "all:8", "batch:all", build, feeds).variables["w"]
    assert np.isfinite(w).all()
    assert np.any(w != 1)


def test_summaries_of_the_inner_optimizer_are_left_out(caplog):
    class Summarizing(mtf.optimize.SgdOptimizer):
        def apply_grads(self, grads, variables):
            mtf.scalar_summary("inner", mtf.reduce_sum(grads[0]))
            return super().apply_grads(grads, variables)

    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        result = run(
            "placement", "4x2", lambda: accumulate(Summarizing(0.1), "4x2"), models.mlp_batches(1)
        )
    names = [
        name for name, _ in result.graph.get_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY)
    ]
    assert names
    assert not [n for n in names if "inner" in n]
    assert any("left out" in r.getMessage() for r in caplog.records)


def test_a_restored_sum_larger_than_asked_for_waits_for_a_step_that_counts():
    """mini_step 3 of 4, then 2 are asked for: a step that is left out brings no update."""
    feeds = models.mlp_batches(5)
    feeds[3]["x"] = np.full_like(feeds[3]["x"], np.nan)
    passes = lambda step: 4 - 2 * step  # noqa: E731, 4, then 2, then 0, which counts as 1
    result = run(
        "placement",
        "4x2",
        lambda: accumulate(
            models.OPTIMIZERS["sgd"](), "4x2", passes, should_skip_update_fn=gs.skip_not_finite
        ),
        feeds,
    )
    counters = "GradientAccumulationOptimizer/"
    assert result.variables[counters + "update_step"] == 1
    assert result.variables[counters + "skipped"] == 1
