"""GradientAccumulationOptimizer: trajectories, state, composition, and what it refuses."""

import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.accumulation import LOCAL, SHARDED, SYNCED
from tests import harness, models, reference
from tests.optimizers.accumulation.accumulation_runs import (
    STEPS,
    K,
    accumulate,
    assert_close,
    built,
    joined,
    run,
    two_parameter_model,
)

WHERE = [("4x2", LOCAL), ("2x2x2", LOCAL), ("2x2", SYNCED), ("2x2x2", SHARDED)]


@pytest.mark.parametrize(
    ("kind", "where", "optimizer"),
    # Each place and each optimizer as a SIMD program; on a placement mesh, each place.
    harness.on_both(
        harness.pairs(WHERE, sorted(models.OPTIMIZERS)),
        [(("2x2", LOCAL), "adafactor"), (("2", SYNCED), "momentum")],
    ),
)
@pytest.mark.mostly_slow
def test_mean_equals_one_batch_of_all_microbatches(kind, where, optimizer):
    """One mesh has shuffled cores, with Adafactor, which has sums over the mesh of its own."""
    mesh, place = where
    feeds = models.mlp_batches(STEPS)
    make = models.OPTIMIZERS[optimizer]
    result = run(
        kind,
        mesh,
        lambda: accumulate(make(), mesh, place=place, average_aggregated_gradients=True),
        feeds,
        grappler=True,
        logical_to_physical=harness.SHUFFLED if mesh == "4x2" else None,
    )
    assert_close(result.variables, reference.train(optimizer, joined(feeds)))


@pytest.mark.mostly_slow
def test_variables_and_slots_keep_their_bits_between_updates(mesh_kind):
    feeds = models.mlp_batches(K)
    program = built(mesh_kind, "2", lambda: accumulate(models.OPTIMIZERS["adam"](), "2"))
    *_, before, after = program.after_each(feeds)
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


def test_bfloat16_activations_add_up_in_float32(mesh_kind):
    """256 + 1 is 256 in bfloat16."""
    batch = mtf.Dimension("batch", 8)
    feeds = [{"x": np.full(8, v, "f")} for v in (32.0, 0.125, 0.125, 0.125)]
    dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)

    def build(mesh, inputs):
        x = mtf.import_tf_tensor(mesh, tf.cast(inputs["x"], tf.bfloat16), mtf.Shape([batch]))
        w = mtf.get_variable(mesh, "w", mtf.Shape([]), dtype, initializer=tf.zeros_initializer())
        optimizer = accumulate(mtf.optimize.SgdOptimizer(1.0), "2", 4)
        operations = optimizer.minimize(mtf.reduce_sum(x * w))
        (accumulator,) = [v for v in optimizer.variables() if "accumulator" in v.name]
        assert accumulator.slice_dtype == tf.float32
        return operations, {}

    result = harness.run(mesh_kind, "all:2", "batch:all", build, feeds)
    assert float(result.variables["w"]) == -259.0


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, "bfloat16"])
def test_accumulator_dtype(dtype):
    result = run(
        "placement",
        "2",
        lambda: accumulate(models.OPTIMIZERS["sgd"](), "2", accumulator_dtype=dtype),
        models.mlp_batches(1),
    )
    expected = tf.as_dtype(dtype).as_numpy_dtype
    assert result.variables["w1/gradient_accumulator"].dtype == expected


def test_local_accumulators_take_one_slice_a_core():
    made = built("placement", "2x2", lambda: accumulate(models.OPTIMIZERS["sgd"](), "2x2"), False)
    laid_out = {v.name: x for v, x in made.lowering.variables.items()}
    for name in models.mlp_values():
        weight = laid_out[name].laid_out_tensor.slice_shape
        assert laid_out[name + "/gradient_accumulator"].laid_out_tensor.slice_shape == [1, *weight]


class TestComposition:
    """With the other stages."""

    def test_clipping_per_shard_and_microbatch_step_and_globally_per_update(self, mesh_kind):
        feeds = models.mlp_batches(4)
        shard_norm, update_norm = 0.1, 0.15

        def build(mesh, inputs):
            grads, variables = models.gradients(models.mlp_loss(mesh, inputs))
            axes = gs.ReplicaAxes(*harness.MESHES["2"][:2])
            clipped, _ = gs.clip_by_shard_norm(grads, shard_norm, axes)
            inner = gs.ClipByGlobalNormOptimizer(models.OPTIMIZERS["sgd"](), update_norm)
            optimizer = gs.GradientAccumulationOptimizer(inner, 2, axes=axes)
            return optimizer.apply_grads(clipped, variables), {}

        shape, layout, _ = harness.MESHES["2"]
        result = harness.run(mesh_kind, shape, layout, build, feeds)
        values = {k: np.asarray(v, float) for k, v in models.mlp_values().items()}
        for start in (0, 2):
            total = {k: 0.0 for k in values}
            for feed in feeds[start : start + 2]:
                for rows in np.split(np.arange(models.BATCH), 2):
                    part = {k: v[rows].astype(float) for k, v in feed.items()}
                    grads = reference.mlp_grads(values, part["x"], part["y"])
                    grads = {k: g / 2 for k, g in grads.items()}  # a half of the mean
                    grads = reference.clipped(grads, shard_norm)
                    total = {k: total[k] + grads[k] for k in total}
            assert reference.norm(total) > update_norm
            values = reference.Sgd()(values, reference.clipped(total, update_norm))
        assert_close(result.variables, values)


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
    optimizer = accumulate(mtf.optimize.SgdOptimizer(0.1), "2")
    results = [run("placement", "2", lambda: optimizer, models.mlp_batches(K)) for _ in range(2)]
    np.testing.assert_array_equal(results[0].variables["w1"], results[1].variables["w1"])


def test_summaries_of_the_inner_optimizer_are_removed(caplog):
    class Summarizing(mtf.optimize.SgdOptimizer):
        def apply_grads(self, grads, variables):
            mtf.scalar_summary("inner", mtf.reduce_sum(grads[0]))
            return super().apply_grads(grads, variables)

    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        made = built("placement", "2", lambda: accumulate(Summarizing(0.1), "2"))
    names = [
        name for name, _ in made.graph.get_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY)
    ]
    assert names
    assert not [n for n in names if "inner" in n]
    assert any("that some steps skip" in r.getMessage() for r in caplog.records)
