"""LossScaleOptimizer: the steps that it skips, how the scale moves, which bits do not change."""

import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference
from tests.sessions import session_of
from tests.sessions import train as steps

# As for CrossShardOptimizer's trajectories.
TOLERANCE = 6 * 16 * np.finfo(np.float32).eps
# Of these steps; on the others all gradients are finite.
BAD_STEPS = {1: 5, 3: 2, 4: 2}  # step -> the row of the batch that is infinite
STEPS = 8
RULE = {"initial_scale": 8.0, "growth_steps": 2, "min_scale": 2.0, "max_scale": 16.0}


def feeds():
    batches = models.mlp_batches(STEPS)
    for step, row in BAD_STEPS.items():
        batches[step]["y"][row, 1] = np.inf
    return batches


def good_feeds():
    return [feed for step, feed in enumerate(models.mlp_batches(STEPS)) if step not in BAD_STEPS]


def scales(bad, initial_scale=8.0, growth_steps=2, min_scale=2.0, max_scale=16.0, multiplier=2.0):
    """The law of the scale: (scale, good steps, skipped steps) after each step.

    `bad` says for each step whether it is skipped; None if it has no data.
    """
    scale, good, skipped, after = initial_scale, 0, 0, []
    for is_bad in bad:
        if is_bad is None:
            pass
        elif is_bad:
            scale, good, skipped = max(scale / multiplier, min_scale), 0, skipped + 1
        else:
            good += 1
            if good == growth_steps:
                scale, good = min(scale * multiplier, max_scale), 0
        after.append((scale, good, skipped))
    return after


def told(optimizer):
    """What is fetched of the scale in each step."""
    values = gs.reported(optimizer)
    return {name: values[f"loss_scale/{name}"] for name in ("scale", "good_steps", "skipped")}


def found(result):
    """The same as `scales`, of a run that fetched `told`."""
    return [tuple(np.ravel(x)[0] for x in step.values()) for step in result.fetched]


def train(make, batch_dims=("batch",), own_gradients=False):
    """A step by compute_gradients, or by mtf.gradients as pipelines call it."""

    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs, batch_dims)
        optimizer = make()
        made = {"initializer": tf.zeros_initializer(), "trainable": False}
        count = mtf.get_variable(mesh, "count", mtf.Shape([]), tf.int32, **made)
        if own_gradients:
            grads, variables = models.gradients(loss)
            pairs = list(zip(grads, variables))
        else:
            pairs = optimizer.compute_gradients(loss)
        updates = optimizer.apply_gradients(pairs, global_step=count)
        return updates, told(optimizer)

    return build


INNER = {
    "bare": lambda opt, mesh: opt,
    "cross shard": lambda opt, mesh: gs.CrossShardOptimizer(opt),
    "clipped": lambda opt, mesh: gs.ClipByGlobalNormOptimizer(opt, 100.0),
    "sharded": lambda opt, mesh: gs.ShardedUpdateOptimizer(
        opt, mesh_shape=mesh[0], layout=mesh[1], batch_dims=mesh[2], min_size=1
    ),
}


@pytest.mark.parametrize(
    ("kind", "mesh", "inner", "optimizer", "own_gradients"),
    [
        ("placement", "2", "bare", "momentum", True),
        ("placement", "2x2", "sharded", "adam", False),
        ("simd", "2", "bare", "momentum", False),
        ("simd", "2x2", "cross shard", "adam", False),
        ("simd", "2x2x2", "clipped", "adafactor", True),
        ("simd", "2", "sharded", "sgd", True),
        ("xla", "2", "sharded", "adam", True),
    ],
)
@pytest.mark.mostly_slow
def test_what_is_not_finite_is_skipped(kind, mesh, inner, optimizer, own_gradients):
    shape, layout, batch_dims = harness.MESHES[mesh]

    def inside():
        return INNER[inner](models.OPTIMIZERS[optimizer](), harness.MESHES[mesh])

    def make():
        return gs.LossScaleOptimizer(inside(), **RULE)

    build = train(make, batch_dims, own_gradients)
    result = harness.run(kind, shape, layout, build, feeds())
    assert found(result) == scales([step in BAD_STEPS for step in range(STEPS)])
    assert result.variables["count"] == STEPS - len(BAD_STEPS)
    reference.assert_close(result.variables, reference.train(optimizer, good_feeds()), TOLERANCE)
    if kind == "xla":
        return  # which compiles another program, with other roundings
    # Without the wrapper, a bare optimizer's sums are Mesh-TF's, in an order of their own.
    alone = (lambda: gs.CrossShardOptimizer(inside())) if inner == "bare" else inside
    plain = models.train(alone, batch_dims)
    without = harness.run(kind, shape, layout, plain, good_feeds()).variables
    assert set(without) < set(result.variables)
    reference.assert_equal(result.variables, without)


@pytest.mark.parametrize(
    ("layout", "name", "where"),
    [("examples:all", "examples", "(shard 1)"), ("hidden:all", "batch", "(shard unknown)")],
)
@pytest.mark.mostly_slow
def test_a_mesh_with_another_batch_dimension_or_none_is_taken(
    layout, name, where, mesh_kind, caplog, capfd
):
    """As other wrappers do, with a warning where the batch is split along another dimension."""

    def make():
        return gs.LossScaleOptimizer(models.OPTIMIZERS["sgd"](), **RULE)

    build = train(make, (name,), own_gradients=True)
    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        result = harness.run(mesh_kind, "all:4", layout, build, feeds()[:3])
    reference.assert_close(result.variables, reference.train("sgd", good_feeds()[:2]), TOLERANCE)
    assert result.variables["LossScaleOptimizer/skipped"] == 1
    told = [record.getMessage() for record in caplog.records]
    warned = [line for line in told if "Give batch_dims=" in line]
    assert len(warned) == (name != "batch")
    assert all("('examples',)" in line for line in warned)
    (line,) = [x for x in told + capfd.readouterr().err.splitlines() if "step skipped" in x]
    assert line.startswith("LossScaleOptimizer")
    assert where in line


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.slow
def test_inside_accumulation_an_update_is_skipped_as_a_whole(kind):
    shape, layout, batch_dims = harness.MESHES["2"]

    def make():
        scaled = gs.LossScaleOptimizer(models.OPTIMIZERS["momentum"](), **RULE)
        return gs.GradientAccumulationOptimizer(scaled, 2, mesh_shape=shape, layout=layout)

    result = harness.run(kind, shape, layout, train(make, batch_dims), feeds())
    # Of the pairs of steps (0, 1), (2, 3), (4, 5) the second is bad, the first, the first.
    bad = [True, True, True, False]
    expected = [(8.0, 0, 0)]  # a step without an update leaves it as it is
    for after in scales(bad):
        expected += [after, after]
    assert found(result) == expected[:STEPS]
    batches = models.mlp_batches(STEPS)[6:]
    model = reference.Accumulation(reference.OPTIMIZERS["momentum"](), 2)
    reference.assert_close(result.variables, reference.train(model, batches), TOLERANCE)


@pytest.mark.parametrize("kind", ["placement", "simd", "xla"])
@pytest.mark.mostly_slow
def test_around_accumulation_a_microbatch_step_is_skipped(kind):
    shape, layout, batch_dims = harness.MESHES["2"]

    def make():
        accumulation = gs.GradientAccumulationOptimizer(
            models.OPTIMIZERS["momentum"](),
            2,
            should_skip_update_fn=gs.skip_not_finite,
            mesh_shape=shape,
            layout=layout,
        )
        return gs.LossScaleOptimizer(accumulation, **RULE)

    result = harness.run(kind, shape, layout, train(make, batch_dims), feeds())
    assert found(result) == scales([step in BAD_STEPS for step in range(STEPS)])
    model = reference.Accumulation(reference.OPTIMIZERS["momentum"](), 2)
    reference.assert_close(result.variables, reference.train(model, good_feeds()), TOLERANCE)


@pytest.mark.parametrize(("kind", "shards"), [("placement", 2), ("simd", 4)])
@pytest.mark.mostly_slow
def test_around_sync_replicas_the_other_shards_contribute(kind, shards):
    shape, layout, batch_dims = harness.MESHES[str(shards)]

    def make():
        inner = gs.SyncReplicasOptimizer(
            models.OPTIMIZERS["sgd"](), shards - 1, mesh_shape=shape, layout=layout
        )
        return gs.LossScaleOptimizer(inner, **RULE)

    result = harness.run(kind, shape, layout, train(make, batch_dims), feeds())
    assert found(result) == scales([False] * STEPS)
    values = {k: np.asarray(v, float) for k, v in models.mlp_values().items()}
    for step, feed in enumerate(models.mlp_batches(STEPS)):
        feed = {k: v.astype(float) for k, v in feed.items()}
        rows = np.arange(models.BATCH)
        if step in BAD_STEPS:
            size = models.BATCH // shards
            rows = rows[rows // size != BAD_STEPS[step] // size]
        grads = reference.mlp_grads(values, feed["x"][rows], feed["y"][rows])
        values = reference.Sgd()(values, grads)
    reference.assert_close(result.variables, values, TOLERANCE)
    assert result.variables["count"] == STEPS


def averaged(opt):
    return gs.AverageOptimizer(opt, 0.5)


# How a shard is told not to contribute, and what stands around the replicas and the scale.
@pytest.mark.parametrize(
    ("kind", "how", "accept_summed", "inside", "outside"),
    [
        ("shared", "masked", False, None, None),
        ("placement", "masked", True, averaged, None),
        ("simd", "masked", False, averaged, None),
        ("simd", "stale", False, None, averaged),
        ("simd", "weights", False, None, None),
        pytest.param("placement", "weights", False, None, averaged, marks=pytest.mark.slow),
        pytest.param("xla", "masked", False, None, averaged, marks=pytest.mark.xla),
        pytest.param("xla", "weights", True, None, None, marks=[pytest.mark.xla, pytest.mark.slow]),
    ],
)
@pytest.mark.mostly_slow
def test_what_a_skipped_shard_has_is_no_overflow(
    kind, how, accept_summed, inside, outside, capfd, caplog
):
    """float16: a NaN that is masked, a NaN that is skipped, and a scale that is too large."""
    shape, layout = "a:2;b:2", "batch:b"
    rule = {"initial_scale": 2.0**15, "growth_steps": 3, "min_scale": 1.0, "max_scale": 2.0**15}
    nan, yes, no = np.nan, True, False
    # The inputs, who contributes, whether the scale is too large, and who is applied. A shard's
    # term is half its input: 4 / 2 times 2^15 is more than float16 holds.
    steps = [
        *[([0.5, nan], [yes, no], False, [0])] * 4,
        *[([0.5, nan], [yes, yes], False, [0])] * 4,
        ([4.0, 1.0], [no, yes], False, [1]),
        ([8.0, 1.0], [yes, yes], False, [1]),
        ([4.0, 1.0], [yes, no], True, []),
        ([4.0, 1.0], [yes, no], False, [0]),
        ([4.0, 1.0], [yes, yes], False, [0, 1]),
        ([nan, nan], [no, no], None, []),
        ([nan, nan], [yes, yes], True, []),
    ]

    def build(mesh, inputs):
        batch = mtf.Dimension("batch", 2)
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch]))
        narrow = mtf.VariableDType(tf.float32, tf.float32, tf.float16)
        w = models.variable(mesh, "w", [], dtype=narrow)
        losses = mtf.cast(x, tf.float16) * w
        loss = mtf.reduce_mean(losses)
        where = {"mesh_shape": shape, "layout": layout}
        given, weights, asked = {}, None, inputs["contributes"]
        if how == "masked":
            given["contributes"] = asked
        elif how == "stale":
            given["local_steps"] = tf.where_v2(asked, 1000, -1)
        else:
            weights = mtf.import_tf_tensor(mesh, tf.cast(asked, tf.float32), mtf.Shape([batch]))
            share = mtf.cast(weights / mtf.reduce_sum(weights), tf.float16)
            loss = mtf.reduce_sum(losses * share) * 0.5
        inner = gs.SyncReplicasOptimizer(
            mtf.optimize.SgdOptimizer(1.0), 1, accept_summed=accept_summed, **given, **where
        )
        scaled = gs.LossScaleOptimizer(inside(inner) if inside else inner, **rule, **where)
        optimizer = outside(scaled) if outside else scaled
        updates = optimizer.apply_grads(mtf.gradients([loss], [w]), [w.operation], weights=weights)
        return updates, told(scaled)

    feeds = [{"x": np.array(x, "f"), "contributes": np.array(ok)} for x, ok, _, _ in steps]
    built = harness.built(kind, shape, layout, build, feeds[0])
    assert not built.races()
    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        result = built.run(feeds)
    assert found(result) == scales([bad for _, _, bad, _ in steps], **rule)
    w = 0.0
    for x, _, _, applied in steps:
        unit = 0.5 if how == "weights" else 1.0
        w -= unit * np.mean(np.array(x)[applied]) if applied else 0
    assert result.variables["w"] == w
    lines = [*capfd.readouterr().err.splitlines(), *(r.getMessage() for r in caplog.records)]
    named = [line.partition("not finite: ")[2] for line in lines if "step skipped" in line]
    assert [line.partition(".")[0] for line in named] == ["w (shard 0)", "w (shard 0), w (shard 1)"]


# Whether steps have an overflow; None where their weight is 0.
WITHOUT_DATA = [None, None, False, None, None, False, False, None, True, None, False, False, None]
AROUND = {
    "alone": (lambda opt: opt, 1),
    "in accumulation": (lambda opt: gs.GradientAccumulationOptimizer(opt, 2), 2),
    "around accumulation": (
        lambda opt: gs.GradientAccumulationOptimizer(
            opt, 2, should_skip_update_fn=gs.skip_not_finite
        ),
        1,
    ),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("simd", name) for name in AROUND),
        ("placement", "in accumulation"),
        pytest.param("xla", "around accumulation", marks=pytest.mark.xla),
    ],
)
@pytest.mark.mostly_slow
def test_a_step_without_data_is_no_progress_of_the_scale(name, kind):
    wrap, times = AROUND[name]

    def build(mesh, inputs):
        x, weight = (mtf.import_tf_tensor(mesh, inputs[k], mtf.Shape([])) for k in ("x", "weight"))
        w = mtf.get_variable(mesh, "w", mtf.Shape([]), initializer=tf.zeros_initializer())
        inner = mtf.optimize.SgdOptimizer(1.0)
        if name == "around accumulation":
            opt = scaled = gs.LossScaleOptimizer(wrap(inner), **RULE)
        else:
            scaled = gs.LossScaleOptimizer(inner, **RULE)
            opt = wrap(scaled)
        return opt.minimize(x * w, weights=weight), told(scaled)

    feeds = [
        {"x": np.float32(np.inf if bad else 1.0), "weight": np.float32(bad is not None)}
        for bad in WITHOUT_DATA
        for _ in range(times)
    ]
    result = harness.run(kind, "b:2", "", build, feeds)
    assert found(result)[times - 1 :: times] == scales(WITHOUT_DATA)


def test_all_shards_decide_alike():
    """Fetching from CPU replicas compares the cores; here all slices are compared."""
    shape, layout, batch_dims = harness.MESHES["4"]

    def make():
        return gs.LossScaleOptimizer(models.OPTIMIZERS["momentum"](), **RULE)

    built = harness.built("placement", shape, layout, train(make, batch_dims), feeds()[0])
    with session_of(built) as session:
        steps(built, session, feeds())
        for variable, laid_out in built.lowering.variables.items():
            first, *others = session.run(list(laid_out.laid_out_tensor.all_slices))
            assert len(others) == 3
            for other in others:
                np.testing.assert_array_equal(other, first, err_msg=variable.name)
