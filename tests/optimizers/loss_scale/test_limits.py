"""What overflows on the way: sums, norms, the scale itself, and losses that are narrow."""

import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

SHAPE, LAYOUT = "rows:4", "batch:rows"
AXES = gs.ReplicaAxes(SHAPE, LAYOUT)


def program(make, dtype=tf.float32, loss_dtype=None):
    """A variable of zeros whose gradient is the sum of the inputs over a batch of four."""

    def build(mesh, inputs):
        batch, dim = mtf.Dimension("batch", 4), mtf.Dimension("wide", 4)
        x = mtf.cast(mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, dim])), dtype)
        kind = mtf.VariableDType(tf.float32, tf.float32, dtype)
        w = mtf.get_variable(mesh, "w", [dim], kind, initializer=tf.zeros_initializer())
        loss = mtf.cast(mtf.reduce_sum(x * w), loss_dtype or dtype)
        optimizer = make()
        updates = optimizer.apply_grads(mtf.gradients([loss], [w]), [w.operation])
        told = gs.reported(optimizer)
        return updates, {x: told[x] for x in told if x.startswith("loss_scale/")}

    return build


def run(kind, make, values, **how):
    feeds = [{"x": np.full([4, 4], value, "f")} for value in values]
    result = harness.run(kind, SHAPE, LAYOUT, program(make, **how), feeds)
    scales = [float(step.get("loss_scale/scale", np.nan)) for step in result.fetched]
    return result.variables["w"], scales, int(result.fetched[-1]["loss_scale/skipped"])


def sgd():
    return mtf.optimize.SgdOptimizer(1.0)


def sharded():
    return gs.ShardedUpdateOptimizer(sgd(), axes=AXES, min_size=1)


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.mostly_slow
def test_a_sum_of_finite_shards_that_overflows_in_float16(kind):
    """Accumulation of sums leaves the step out, and the scale has to learn of it."""

    def make():
        accumulation = gs.GradientAccumulationOptimizer(
            sgd(), 1, accumulate="synced", should_skip_update_fn=gs.skip_not_finite
        )
        return gs.LossScaleOptimizer(accumulation, initial_scale=2.0**15)

    w, scales, skipped = run(kind, make, [1.0] * 4, dtype=tf.float16)
    # The sum is 4 scale: 2^14 times 4 is more than float16 holds, 2^13 times 4 is not.
    assert scales == [2.0**14, 2.0**13, 2.0**13, 2.0**13]
    assert skipped == 2
    np.testing.assert_array_equal(w, np.full(4, -8.0))


OUT = {
    "bare": sgd,
    "sharded": sharded,
    "clipped": lambda: gs.ClipByGlobalNormOptimizer(sgd(), 1.0),
    "clipped around parts": lambda: gs.ClipByGlobalNormOptimizer(sharded(), 1.0),
    "clipped parts": lambda: gs.ShardedUpdateOptimizer(
        gs.ClipByGlobalNormOptimizer(sgd(), 1.0), axes=AXES, min_size=1
    ),
}


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.parametrize("inner", OUT)
@pytest.mark.mostly_slow(every=3)
def test_sums_and_norms_that_overflow_are_skipped(kind, inner):
    """Of float32: the sum of four times 2e38, and the norm of four of 2.4e38 where one is made.

    Squares that overflow are no reason: the last step is clipped.
    """
    is_clipped = "clipped" in inner
    values = [2e38, 6e37, 1e25] if is_clipped else [2e38]

    def make():
        return gs.LossScaleOptimizer(OUT[inner](), loss_scale=1.0)

    w, _, skipped = run(kind, make, values)
    assert skipped == (2 if is_clipped else 1)
    np.testing.assert_allclose(w, np.full(4, -0.5 if is_clipped else 0.0), rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda opt: opt, gs.CrossShardOptimizer])
@pytest.mark.mostly_slow
def test_momentum_takes_narrow_gradients(wrap):
    def make():
        return gs.LossScaleOptimizer(wrap(mtf.optimize.MomentumOptimizer(0.5, 0.5)))

    w, _, _ = run("simd", make, [0.25, 0.25], dtype=tf.float16)
    # Of the gradients 1 and 1; the velocity is used a step later.
    np.testing.assert_array_equal(w, np.full(4, -0.5))


@pytest.mark.parametrize(
    ("loss_dtype", "scale"), [(tf.float16, 2.0**17), (tf.float16, 4099.0), (tf.bfloat16, 1001.0)]
)
@pytest.mark.mostly_slow(keep="1001")
def test_a_narrow_loss_takes_a_scale_that_it_can_hold(loss_dtype, scale):
    """Gradients are divided by the same number, so that no error is left."""

    def make():
        return gs.LossScaleOptimizer(sgd(), loss_scale=scale)

    w, _, skipped = run("simd", make, [0.25], loss_dtype=loss_dtype)
    assert skipped == 0
    # float32 rounds a product with a reciprocal twice.
    np.testing.assert_allclose(w, np.full(4, -1.0), rtol=2 * np.finfo(np.float32).eps)


def scaled(**where):
    return gs.LossScaleOptimizer(sgd(), loss_scale=1.0, **where)


# What a line names, by the wrapper around the loss scale.
AROUND = {
    "accumulated": (lambda: gs.GradientAccumulationOptimizer(scaled(), 2, axes=AXES), "shard 2"),
    "summed before": (lambda: gs.CrossShardOptimizer(scaled(axes=AXES)), "shard 2"),
    # Of sums that are added up, nobody knows any more.
    "sums accumulated": (
        lambda: gs.GradientAccumulationOptimizer(scaled(axes=AXES), 2, accumulate="synced"),
        "shard unknown",
    ),
}


@pytest.mark.parametrize("wrap", list(AROUND))
@pytest.mark.mostly_slow
def test_what_is_not_finite_of_one_shard_is_named_behind_a_reduction(
    wrap, mesh_kind, capfd, caplog
):
    make, named = AROUND[wrap]
    feeds = [{"x": np.ones([4, 4], "f")} for _ in range(4)]
    feeds[1]["x"][2, 1] = np.nan
    # The sum alone overflows: four times 2^126 is infinite in float32.
    feeds[3]["x"][:] = 2.0**126

    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        harness.run(mesh_kind, SHAPE, LAYOUT, program(make), feeds)
    lines = [*capfd.readouterr().err.splitlines(), *(r.getMessage() for r in caplog.records)]
    lines = [line for line in lines if "step skipped" in line]
    assert [line.partition("not finite: ")[2].partition(".")[0] for line in lines] == [
        f"w ({named})",
        "w (sum over shards)" if named == "shard 2" else f"w ({named})",
    ]


def test_a_norm_that_overflows_is_reported(capfd):
    def make():
        clipped = gs.ClipByGlobalNormOptimizer(sgd(), 1.0)
        return gs.LossScaleOptimizer(clipped, loss_scale=1.0, axes=AXES)

    run("placement", make, [6e37])
    assert "not finite: none by itself, but the norm of all." in capfd.readouterr().err
