"""Optimizers that round bfloat16 variables and slots by chance."""

import functools

import gin
import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference, wrappers
from tests.sessions import ran

SHAPE, LAYOUT, _ = harness.MESHES["2x2"]
AXES = {"mesh_shape": SHAPE, "layout": LAYOUT}
BFLOAT16 = mtf.VariableDType(tf.bfloat16, tf.bfloat16, tf.bfloat16)
STOCHASTIC = {"rounding": "stochastic"}
VARIABLES = {"w": [("in", 6), ("hidden", 8)], "heads": [("hidden", 8), ("out", 4), ("model", 2)]}


def sgd(rate, **kwargs):
    return gs.MeshOptimizer(tf.train.GradientDescentOptimizer(rate), **kwargs)


OPTIMIZERS = {
    "adamw": lambda: gs.AdamWOptimizer(0.01, 0.1, **STOCHASTIC),
    "adamw with narrow slots": lambda: gs.AdamWOptimizer(
        0.01, 0.1, **STOCHASTIC, slot_dtype="bfloat16"
    ),
    "muon": lambda: gs.MuonOptimizer(0.01, **STOCHASTIC),
    "sgd": lambda: sgd(0.01, **STOCHASTIC),
    "adam of tensorflow": lambda: gs.MeshOptimizer(tf.train.AdamOptimizer(0.01), **STOCHASTIC),
    "ftrl of tensorflow": lambda: gs.MeshOptimizer(tf.train.FtrlOptimizer(0.1), **STOCHASTIC),
}


def applied(make, dtype=BFLOAT16):
    """A `harness.Build` whose gradients are a number that is fed, times one of each element."""

    def build(mesh, inputs):
        values, losses = [], []
        number = mtf.import_tf_tensor(mesh, inputs["gradient"], mtf.Shape([]))
        for name, dims in VARIABLES.items():
            shape = mtf.Shape([mtf.Dimension(*d) for d in dims])
            values.append(models.variable(mesh, name, shape, 1, dtype=dtype))
            times = np.random.RandomState(len(values)).randint(1, 8, shape.to_integer_list)
            times = mtf.import_tf_tensor(mesh, tf.constant(times, tf.float32), shape)
            losses.append(mtf.reduce_sum(mtf.cast(values[-1], tf.float32) * times) * number)
        opt, variables = make(), [v.operation for v in values]
        loss = mtf.add_n(losses)
        if isinstance(opt, gs.LossScaleOptimizer):
            return opt.apply_gradients(opt.compute_gradients(loss, variables)), {}
        return opt.apply_grads(mtf.gradients([loss], values), variables), {}

    return build


def feeds_of(*gradients):
    return [{"gradient": np.float32(g)} for g in gradients]


def as_float32(values):
    return {k: np.asarray(v).astype("f") for k, v in values.items()}


def on_one_core(make, feeds, dtype=BFLOAT16):
    return as_float32(harness.run("placement", *harness.ONE, applied(make, dtype), feeds).variables)


@functools.lru_cache(maxsize=None)
def expected_of(name, *gradients):
    """The variables after updates by an optimizer of `OPTIMIZERS`, on one core."""
    return on_one_core(OPTIMIZERS[name], feeds_of(*gradients))


@pytest.mark.parametrize(("name", "gradient"), [("sgd", -1), ("adamw", 1)])
@pytest.mark.mostly_slow(keep="sgd")
def test_a_thousand_small_steps_are_those_of_float32_in_the_mean(name, gradient):
    """Rounded to nearest, a step of 1/1000 of the value is lost, and so are a thousand."""
    makers = {"sgd": sgd, "adamw": lambda rate, **kwargs: gs.AdamWOptimizer(rate, 0.0, **kwargs)}
    results = {}
    for how, dtype, kwargs in (
        ("float32", tf.float32, {}),
        ("nearest", BFLOAT16, {}),
        ("stochastic", BFLOAT16, STOCHASTIC),
    ):

        def build(mesh, inputs, dtype=dtype, kwargs=kwargs):
            shape = mtf.Shape([mtf.Dimension("in", 64), mtf.Dimension("hidden", 64)])
            w = mtf.get_variable(mesh, "w", shape, dtype, initializer=tf.ones_initializer())
            grad = mtf.import_tf_tensor(mesh, inputs["gradient"], mtf.Shape([]))
            opt = gs.CrossShardOptimizer(makers[name](1e-3, **kwargs))
            return opt.apply_grads([mtf.ones(mesh, shape) * grad], [w.operation]), {}

        found = harness.run("simd", SHAPE, LAYOUT, build, feeds_of(gradient) * 1000).variables["w"]
        results[how] = np.asarray(found).astype("d")
    moved = {how: 1 - np.mean(values) for how, values in results.items()}
    assert moved["float32"] == pytest.approx(gradient, rel=1e-3)
    assert moved["nearest"] == 0
    # Of 4,096 elements; one alone walks at random around it.
    assert moved["stochastic"] == pytest.approx(moved["float32"], rel=0.01)
    assert 0.01 < np.std(results["stochastic"]) < 0.2


# Those that write parts of variables are on both kinds of mesh together, each on one.
@pytest.mark.parametrize(("kind", "wrapper"), harness.pairs(["placement", "simd"], wrappers.ALIKE))
@pytest.mark.mostly_slow
def test_in_every_wrapper_bits_are_those_of_one_core(kind, wrapper):
    """Those of variables and of slots, split or not, in parts or not."""
    optimizer = "adamw with narrow slots"
    gradients = [g for g in (1, 2, -4) for _ in range(wrappers.passes(wrapper))]
    build = applied(lambda: wrappers.wrap(wrapper, OPTIMIZERS[optimizer](), AXES))
    found = harness.run(kind, SHAPE, LAYOUT, build, feeds_of(*gradients)).variables
    held = {k.removesuffix("/island"): k for k in found if k.endswith("/island")}
    for name, value in expected_of(optimizer, 1, 2, -4).items():
        if name in {f"{v}{slot}" for v in VARIABLES for slot in ("", "/adam_m", "/adam_v")}:
            here = np.asarray(found[held.get(name, name)])
            assert here.dtype == tf.bfloat16.as_numpy_dtype
            np.testing.assert_array_equal(here.astype("f"), value, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "name"),
    harness.pairs(["placement", "simd"], ["adamw", "muon", "sgd", "ftrl of tensorflow"]),
)
@pytest.mark.mostly_slow
def test_every_optimizer_rounds_alike_on_every_mesh(kind, name):
    """In parts: a variable that is split by the layout and by sharded updates."""
    expected = expected_of(name, 1, 2, -4)
    build = applied(lambda: gs.ShardedUpdateOptimizer(OPTIMIZERS[name](), min_size=2, **AXES))
    found = as_float32(harness.run(kind, SHAPE, LAYOUT, build, feeds_of(1, 2, -4)).variables)
    for key in expected:
        if name != "muon":
            np.testing.assert_array_equal(found[key], expected[key], err_msg=key)
            continue
        # Its products are sums in another order, so that a few elements differ by a rounding.
        differ = found[key] != expected[key]
        assert np.mean(differ) <= 0.1, key
        np.testing.assert_allclose(found[key], expected[key], rtol=2**-7, atol=1e-6)
    counts = [k for k in expected if k.endswith(("rounding_t", "adam_t"))]
    assert len(counts) == len(VARIABLES)
    assert {float(found[k]) for k in counts} == {3}


@pytest.mark.xla
def test_on_xla_devices():
    make = OPTIMIZERS["adamw with narrow slots"]
    build = applied(lambda: gs.CrossShardOptimizer(make()))
    found = as_float32(harness.run("xla", SHAPE, LAYOUT, build, feeds_of(1, 2, -4)).variables)
    for name, value in expected_of("adamw with narrow slots", 1, 2, -4).items():
        # XLA contracts a product and a sum, so that a few elements are rounded the other way.
        assert np.mean(found[name] != value) <= 0.1, name
        np.testing.assert_allclose(found[name], value, rtol=2**-7, atol=1e-6)


@pytest.mark.mostly_slow(keep="simd")
def test_a_skipped_step_changes_nothing(mesh_kind):
    """The bits of the next one are those that it would have had without the skipped step."""
    make = OPTIMIZERS["adamw with narrow slots"]

    def skipping():
        return gs.GradientAccumulationOptimizer(
            make(), 1, should_skip_update_fn=gs.skip_not_finite, **AXES
        )

    build = applied(skipping)
    after = harness.built(mesh_kind, SHAPE, LAYOUT, build, feeds_of(1)[0]).after_each(
        feeds_of(1, np.nan, 2)
    )
    for name, value in expected_of("adamw with narrow slots", 1, 2).items():
        np.testing.assert_array_equal(after[2][name].astype("f"), value, err_msg=name)
        np.testing.assert_array_equal(after[1][name], after[0][name], err_msg=name)


def trained(make, path, steps, directory):
    """Makes steps from a checkpoint; returns the variables and a new checkpoint."""

    def build(mesh, inputs):
        shape = mtf.Shape([mtf.Dimension("in", 8), mtf.Dimension("out", 4)])
        w = mtf.get_variable(mesh, "w", shape, BFLOAT16, initializer=tf.ones_initializer())
        return make().apply_grads([mtf.ones(mesh, shape)], [w.operation]), {}

    made, saved = harness.built("placement", *harness.ONE, build, {}), f"{directory}/model"
    return as_float32(ran(made, [{}] * steps, path, saved)), saved


@pytest.mark.parametrize("name", ["adamw with narrow slots", "muon", "adam of tensorflow"])
def test_a_restart_goes_on_with_the_same_bits(name, tmp_path):
    make = lambda: gs.CrossShardOptimizer(OPTIMIZERS[name]())  # noqa: E731
    expected, _ = trained(make, None, 4, tmp_path / "one")
    before, path = trained(make, None, 2, tmp_path / "two")
    after, _ = trained(make, path, 2, tmp_path / "two")
    reference.assert_equal(after, expected)
    assert (after["w"] != before["w"]).any()


@pytest.mark.parametrize(
    "make",
    [
        lambda **kwargs: gs.MuonOptimizer(0.01, **kwargs),
        lambda **kwargs: sgd(0.01, **kwargs),
        lambda **kwargs: gs.AdamWOptimizer(0.01, **kwargs),
    ],
)
def test_a_checkpoint_that_was_rounded_to_nearest_goes_on(make, tmp_path):
    """And the reverse: a counter begins at zero, or is not read."""
    nearest = lambda: gs.CrossShardOptimizer(make())  # noqa: E731
    stochastic = lambda: gs.CrossShardOptimizer(make(**STOCHASTIC))  # noqa: E731
    before, path = trained(nearest, None, 2, tmp_path / "a")
    after, path = trained(stochastic, path, 2, tmp_path / "b")
    assert (after["w"] != before["w"]).any()
    counts = {k: v for k, v in after.items() if k.endswith("_t")}
    assert list(counts.values()) in ([2.0], [4.0])  # of these updates, or of Adam's
    trained(nearest, path, 1, tmp_path / "c")


@pytest.mark.parametrize("make", [gs.MuonOptimizer, sgd])
def test_so_does_one_without_a_wrapper(make, tmp_path):
    make = functools.partial(make, 0.01)
    _, path = trained(make, None, 2, tmp_path / "a")
    after, _ = trained(functools.partial(make, **STOCHASTIC), path, 2, tmp_path / "b")
    assert after["w/rounding_t"] == 2


def test_variables_that_steps_write_in_float32_are_as_without_it_and_that_is_told(caplog):
    dtype = mtf.VariableDType(tf.bfloat16, tf.float32, tf.float32)  # bfloat16 in checkpoints only
    for make in (lambda **kwargs: gs.AdamWOptimizer(0.01, **kwargs), lambda **k: sgd(0.01, **k)):
        graphs = []
        for kwargs in ({}, STOCHASTIC):
            built = harness.built(
                "simd",
                SHAPE,
                LAYOUT,
                applied(lambda make=make, kwargs=kwargs: make(**kwargs), dtype),
                feeds_of(1)[0],
                may_race=True,
            )
            graphs.append([(op.name, op.type) for op in built.graph.get_operations()])
        assert graphs[0] == graphs[1]
    told = [line for line in caplog.messages if "changes nothing" in line]
    assert [line.split(":")[0] for line in told] == ["AdamWOptimizer", "MeshOptimizer"]
    assert all("bfloat16 as its slice_dtype" in line for line in told)


def test_only_what_is_lost_is_told(caplog):
    for name in ("adamw", "sgd", "adam of tensorflow", "muon"):
        on_one_core(OPTIMIZERS[name], feeds_of(1))
    frozen = [("heads", None)]
    on_one_core(
        lambda: gs.CrossShardOptimizer(gs.ByVariable(OPTIMIZERS["adamw"](), frozen)), feeds_of(1)
    )
    assert not [line for line in caplog.messages if "Stored in bfloat16" in line]
    groups = [("heads", gs.AdamWOptimizer(0.01))]
    on_one_core(lambda: gs.ByVariable(OPTIMIZERS["adamw"](), groups), feeds_of(1))
    told = [line for line in caplog.messages if "Stored in bfloat16" in line or "slots" in line]
    assert len(told) == 1
    assert "are lost: variable heads." in told[0]
    assert told[0].endswith("give gs.AdamWOptimizer or gs.MeshOptimizer rounding='stochastic'.")


@pytest.mark.parametrize("make", [gs.AdamWOptimizer, gs.MuonOptimizer])
@pytest.mark.parametrize("dtype", [tf.int32, "float16", tf.float64, 2, "bf16"])
def test_other_dtypes_of_slots_are_refused(make, dtype):
    with pytest.raises(ValueError, match="slot_dtype must be None, "):
        make(0.1, **STOCHASTIC, slot_dtype=dtype)


def test_slots_in_bfloat16_need_chance():
    with pytest.raises(ValueError, match="slot_dtype=bfloat16 needs rounding='stochastic', got"):
        gs.AdamWOptimizer(0.1, slot_dtype=tf.bfloat16)
    assert gs.AdamWOptimizer(0.1, slot_dtype=tf.float32).slot_dtype == tf.float32
    with pytest.raises(ValueError, match="rounding must be 'nearest' or 'stochastic', got 'up'"):
        gs.MeshOptimizer(tf.train.GradientDescentOptimizer(0.1), rounding="up")


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("position", [1, 2])
def test_float16_is_refused_before_anything_is_built(name, position):
    dtypes = [tf.bfloat16] * 3
    dtypes[position] = tf.float16
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    with tf.Graph().as_default():
        dtype = mtf.VariableDType(*dtypes)
        w = mtf.get_variable(mesh, "w", mtf.Shape([mtf.Dimension("d", 8)]), dtype)
        grad = mtf.ones(mesh, w.shape)
        words = "is for variables in bfloat16 or wider, and 'w' is"
        with harness.unchanged(mesh.graph), pytest.raises(ValueError, match=words):
            OPTIMIZERS[name]().apply_grads([grad], [w.operation])
        assert list(mesh.graph.name_to_variable) == ["w"]


def test_describe_and_gin():
    described = gs.describe(gs.CrossShardOptimizer(OPTIMIZERS["adam of tensorflow"]()))
    assert described.lines[-1].what == "update by Adam, rounding stochastic"
    narrow = OPTIMIZERS["adamw with narrow slots"]()
    groups = [("heads", STOCHASTIC), ("rounding", narrow)]
    grouped = gs.ByVariable(lambda **kwargs: gs.AdamWOptimizer(0.1, **kwargs), groups)
    assert [line.what for line in gs.describe(grouped).lines] == [
        "update by AdamW, rounding stochastic: heads",
        "update by AdamW, rounding stochastic, slot_dtype bfloat16: rounding",
        "update by AdamW: the others",
    ]
    with gin.unlock_config():
        gin.parse_config(
            "CrossShardOptimizer.opt = @AdamWOptimizer\n"
            "AdamWOptimizer.rounding = 'stochastic'\n"
            "AdamWOptimizer.slot_dtype = 'bfloat16'"
        )
    try:
        made = gs.CrossShardOptimizer(learning_rate=0.5).opt
        assert (made.rounding, made.slot_dtype) == ("stochastic", tf.bfloat16)
    finally:
        gin.clear_config()
