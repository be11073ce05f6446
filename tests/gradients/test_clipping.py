"""Clipping by each shard's norm and by the global norm, against numpy in float64."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients import measures
from tests import harness, models

EPS = np.finfo(np.float32).eps
MESH, LAYOUT = "rows:2;cols:2", "batch:rows;hidden:cols;experts:rows"
SHARDS = 2
AXES = gs.ReplicaAxes(MESH, LAYOUT)
B, D, H = 8, 3, 4
batch, features, hidden = (
    mtf.Dimension("batch", B),
    mtf.Dimension("d", D),
    mtf.Dimension("hidden", H),
)


def inputs(seed=0):
    rng = np.random.RandomState(seed)
    x, h = rng.randn(B, D).astype("f"), rng.randn(B, H).astype("f")
    x[:2] *= 100  # the first shard's gradients are huge
    return {"x": x, "h": h}


def pending(mesh, tensors):
    """A replicated and a model-parallel gradient, both pending over the batch, and a None."""
    x = mtf.import_tf_tensor(mesh, tensors["x"], mtf.Shape([batch, features]))
    h = mtf.import_tf_tensor(mesh, tensors["h"], mtf.Shape([batch, hidden]))
    return [mtf.reduce_sum(x, reduced_dim=batch), None, mtf.reduce_sum(h, reduced_dim=batch)]


def by_shard(feed):
    return [v.astype(float).reshape(SHARDS, B // SHARDS, -1).sum(1) for v in (feed["x"], feed["h"])]


def clip(grads, norm, clip_norm):
    return [g * (clip_norm / np.maximum(norm, clip_norm)) for g in grads]


def shard_clip_reference(feed, clip_norm):
    grads = by_shard(feed)
    norm = np.sqrt(sum(np.square(g).sum(1) for g in grads))
    return clip(grads, norm[:, None], clip_norm), norm


def run(kind, make, feed, **kwargs):
    def build(mesh, tensors):
        clipped, norm = make(pending(mesh, tensors))
        assert clipped[1] is None
        return [], {"x": clipped[0], "h": clipped[2], "norm": norm}

    return harness.run(kind, MESH, LAYOUT, build, [feed], **kwargs).fetched[0]


def test_by_shard_norm(mesh_kind):
    feed = inputs()
    out = run(mesh_kind, lambda grads: gs.clip_by_shard_norm(grads, 2.0, AXES), feed)
    (x, h), norm = shard_clip_reference(feed, 2.0)
    np.testing.assert_allclose(out["norm"], norm, rtol=8 * EPS)
    np.testing.assert_allclose(out["x"], x, rtol=16 * EPS, atol=8 * EPS)
    np.testing.assert_allclose(out["h"], h, rtol=16 * EPS, atol=8 * EPS)


def test_by_global_norm(mesh_kind):
    feed = inputs()
    out = run(mesh_kind, lambda grads: gs.clip_by_global_norm(grads, 2.0), feed)
    grads = [g.sum(0) for g in by_shard(feed)]
    norm = np.sqrt(sum(np.square(g).sum() for g in grads))
    x, h = clip(grads, norm, 2.0)
    np.testing.assert_allclose(out["norm"], norm, rtol=8 * EPS)
    np.testing.assert_allclose(out["x"], x, rtol=16 * EPS, atol=8 * EPS)
    np.testing.assert_allclose(out["h"], h, rtol=16 * EPS, atol=8 * EPS)


def test_a_huge_shard_shrinks_the_others_only_under_the_global_norm(mesh_kind):
    feed = inputs()
    shard = run(mesh_kind, lambda grads: gs.clip_by_shard_norm(grads, 5.0, AXES), feed)
    whole = run(mesh_kind, lambda grads: gs.clip_by_global_norm(grads, 5.0), feed)
    quiet = by_shard(feed)[1][1:]  # hidden gradients of the shards that are not huge
    kept = np.linalg.norm(shard["h"][1:]) / np.linalg.norm(quiet)
    assert kept > 0.5
    assert np.linalg.norm(whole["h"]) / np.linalg.norm(quiet.sum(0)) < 0.05


def test_gradients_below_the_norm_keep_their_bits(mesh_kind):
    feed = inputs()

    def build(mesh, tensors):
        grads = gs.per_shard(pending(mesh, tensors), AXES)
        clipped, _ = gs.clip_by_shard_norm(grads, 1e6, AXES)
        return [], {"x": clipped[0], "x before": grads[0]}

    out = harness.run(mesh_kind, MESH, LAYOUT, build, [feed]).fetched[0]
    np.testing.assert_array_equal(out["x"], out["x before"])


CLIP_NORMS = {
    "mtf": lambda mesh: mtf.constant(mesh, 2.0, mtf.Shape([])),
    "tf": lambda mesh: tf.constant(2.0),
    "mtf variable": lambda mesh: models.variable(mesh, "c", [], 2.0, trainable=False).operation,
    "tf variable": lambda mesh: tf.get_variable("c", [], initializer=tf.constant_initializer(2.0)),
}


@pytest.mark.parametrize("form", sorted(CLIP_NORMS))
def test_clip_norm_as_a_tensor(mesh_kind, form):
    feed = inputs()

    def make(grads):
        return gs.clip_by_shard_norm(grads, CLIP_NORMS[form](grads[0].mesh), AXES)

    out = run(mesh_kind, make, feed)
    np.testing.assert_allclose(out["x"], shard_clip_reference(feed, 2.0)[0][0], rtol=16 * EPS)


def test_an_experts_part_counts_to_the_shard_that_holds_it(mesh_kind):
    feed = inputs()

    def build(mesh, tensors):
        experts = mtf.Dimension("experts", B)
        part = mtf.import_tf_tensor(mesh, tensors["x"], mtf.Shape([experts, features]))
        clipped, norm = gs.clip_by_shard_norm([part, pending(mesh, tensors)[2]], 2.0, AXES)
        return [], {"x": clipped[0], "norm": norm}

    out = harness.run(mesh_kind, MESH, LAYOUT, build, [feed]).fetched[0]
    h = by_shard(feed)[1]
    norm = np.sqrt(
        np.square(feed["x"].astype(float)).reshape(SHARDS, -1).sum(1) + np.square(h).sum(1)
    )
    np.testing.assert_allclose(out["norm"], norm, rtol=8 * EPS)
    factor = 2.0 / np.maximum(norm, 2.0)
    np.testing.assert_allclose(
        out["x"], feed["x"] * np.repeat(factor, B // SHARDS)[:, None], rtol=16 * EPS
    )


def test_bfloat16_gradients_have_float32_norms(mesh_kind):
    feed = inputs()

    def build(mesh, tensors):
        grads = [None if g is None else mtf.cast(g, tf.bfloat16) for g in pending(mesh, tensors)]
        clipped, norm = gs.clip_by_global_norm(grads, 2.0)
        assert (clipped[0].dtype, norm.dtype) == (tf.bfloat16, tf.float32)
        return [], {"norm": norm, "x": clipped[0], "h": clipped[2]}

    out = harness.run(mesh_kind, MESH, LAYOUT, build, [feed]).fetched[0]
    rounded = [
        g.sum(0).astype("f").astype(tf.bfloat16.as_numpy_dtype).astype(float)
        for g in by_shard(feed)
    ]
    np.testing.assert_allclose(
        out["norm"], np.sqrt(sum(np.square(g).sum() for g in rounded)), rtol=2**-8
    )
    after = np.sqrt(sum(np.square(out[k].astype(float)).sum() for k in "xh"))
    np.testing.assert_allclose(after, 2.0, rtol=2**-8)


def test_not_finite_stays_with_its_shard(mesh_kind):
    feed = inputs()
    feed["x"][0, 0] = np.nan

    def build(mesh, tensors):
        clipped, _ = gs.clip_by_shard_norm(pending(mesh, tensors), 2.0, AXES)
        # A NaN would spread on its way out of a SIMD program, whose gathers are sums.
        finite = [
            mtf.cwise(lambda t: tf.cast(tf.math.is_finite(t), tf.float32), [g])
            for g in (clipped[0], clipped[2])
        ]
        return [], dict(zip("xh", finite))

    out = harness.run(mesh_kind, MESH, LAYOUT, build, [feed]).fetched[0]
    for finite in out.values():
        np.testing.assert_array_equal(finite, [[i > 0] * finite.shape[1] for i in range(SHARDS)])


KINDS = ["placement", "simd", pytest.param("xla", marks=pytest.mark.xla)]
# A shard's gradient, and the norm that it is clipped to.
EXTREMES = [
    ([3e19, 0, 0, 4e19], 1.0),  # squares overflow
    ([3e37, 4e37, 0, 0], 1.0),
    ([3e-30, 0, 4e-30, 0], 2e-30),  # squares underflow
    ([2e38, 1e10, 1e-10, 1e-20], 1e30),
    ([3, 0, 0, 4], np.inf),
    ([3e38, 0, 3e38, 3e38], np.inf),  # float32 does not hold the norm
    ([0, 0, 0, 0], 0.0),
    ([3, 0, 0, 4], 0.0),
]


@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_gradients_of_any_size(kind):
    """Of float32 and bfloat16, and clip norms as tensors, of which a negative one is an error."""

    def build(mesh, tensors):
        x = mtf.import_tf_tensor(mesh, tensors["x"], mtf.Shape([batch, hidden]))
        grads = [mtf.reduce_sum(x, reduced_dim=batch)]
        narrow = [mtf.cast(g, tf.bfloat16) for g in grads]
        fetches = {}
        for name, some in (("float32", grads), ("bfloat16", narrow)):
            (fetches[name],), fetches[f"{name} norm"] = gs.clip_by_global_norm(
                some, tensors["clip_norm"]
            )
        (shards,), norms = gs.clip_by_shard_norm(grads, tensors["clip_norm"], AXES)
        return [], {**fetches, "shards": shards, "shards norm": norms}

    def feed(grad, clip_norm):
        x = np.zeros((B, H), "f")
        x[0] = grad
        return {"x": x, "clip_norm": np.float32(clip_norm)}

    program = harness.built(kind, MESH, LAYOUT, build, feed([0] * H, 1.0))
    for grad, clip_norm in EXTREMES:
        out = program.run([feed(grad, clip_norm)]).fetched[0]
        for name, dtype in (("float32", "f"), ("bfloat16", tf.bfloat16.as_numpy_dtype)):
            given = np.asarray(grad, "f").astype(dtype).astype(float)
            norm = np.linalg.norm(given)
            expected = given * (1.0 if norm <= clip_norm else clip_norm / norm)
            rtol = 16 * EPS if dtype == "f" else 2**-8
            np.testing.assert_allclose(out[name].astype(float), expected, rtol, err_msg=str(grad))
            with np.errstate(over="ignore"):
                norm = np.float32(norm)
            np.testing.assert_allclose(out[f"{name} norm"], norm, rtol=8 * EPS)
        if np.isfinite(norm):  # or it would be NaN on its way out of a SIMD program
            np.testing.assert_array_equal(out["shards"], [out["float32"], [0] * H])
            np.testing.assert_array_equal(out["shards norm"], [out["float32 norm"], 0])
    for clip_norm in (-1.0, np.nan):
        error = tf.errors.InvalidArgumentError if kind == "placement" else ValueError
        with pytest.raises(error, match=r"clip_by_\w+_norm: clip_norm must be 0 or more, got"):
            program.run([feed([3, 0, 0, 4], clip_norm)])


@pytest.mark.parametrize("kind", KINDS)
def test_norms_that_a_compiler_simplifies(kind):
    """Of gradients with one value, where XLA takes constants out of products."""

    def build(mesh, tensors):
        value = mtf.import_tf_tensor(mesh, tensors["value"], mtf.Shape([]))
        fetches = {}
        for name, dims in (("scalar", []), ("vector", [hidden])):
            grad = mtf.broadcast(value, mtf.Shape(dims))
            fetches[name] = norm = measures.global_norm([grad])
            fetches[f"{name} joined"] = measures.joined_norm([norm, norm])
            shards = mtf.broadcast(value, mtf.Shape([*AXES.shard_dims, *dims]))
            _, norms = gs.clip_by_shard_norm([shards], 1.0, AXES)
            fetches[f"{name} of shards"] = norms
        return [], fetches

    program = harness.built(kind, MESH, LAYOUT, build, {"value": np.float32(1)})
    values = [3e19, 1e37, 1e-22, 1e-28, 3]
    for value, out in zip(values, program.run([{"value": np.float32(v)} for v in values]).fetched):
        for name, size in (("scalar", 1), ("vector", H)):
            norm = value * np.sqrt(size)
            np.testing.assert_allclose(out[name], norm, 8 * EPS)
            np.testing.assert_allclose(out[f"{name} joined"], norm * np.sqrt(2), 8 * EPS)
            np.testing.assert_allclose(out[f"{name} of shards"], [norm] * SHARDS, 8 * EPS)


def test_double_precision_has_a_range_of_its_own():
    """On a placement mesh; others send float32."""

    def build(mesh, tensors):
        grad = mtf.import_tf_tensor(mesh, tensors["x"], mtf.Shape([hidden]))
        (clipped,), norm = gs.clip_by_global_norm([grad], 1.0)
        (tenth,), _ = gs.clip_by_global_norm([grad], 0.1)
        (whole,), _ = gs.clip_by_global_norm([grad], 1e300)
        return [], {"clipped": clipped, "norm": norm, "tenth": tenth, "whole": whole}

    feed = {"x": np.array([3e200, 0, 4e200, 1.0])}
    out = harness.run("placement", MESH, LAYOUT, build, [feed]).fetched[0]
    np.testing.assert_allclose(out["norm"], 5e200, rtol=1e-15)
    np.testing.assert_allclose(out["clipped"], [0.6, 0, 0.8, 2e-201], rtol=1e-15)
    np.testing.assert_allclose(out["tenth"], [0.06, 0, 0.08, 2e-202], rtol=1e-15)
    np.testing.assert_array_equal(out["whole"], feed["x"])


def test_norms_cross_as_they_are(mesh_kind):
    """Squares of gradients that float16 holds are beyond its range."""
    strategy = gs.reduce.CompressedAllReduce(wire_dtype="float16")

    def build(mesh, tensors):
        grad = mtf.import_tf_tensor(mesh, tensors["x"], mtf.Shape([hidden]))
        (clipped,), norm = gs.clip_by_global_norm([grad], 1.0, strategy)
        return [], {"clipped": clipped, "norm": norm}

    feed = {"x": np.array([3e3, 0, 4e3, 0], "f")}
    out = harness.run(mesh_kind, MESH, LAYOUT, build, [feed]).fetched[0]
    np.testing.assert_allclose(out["norm"], 5e3, rtol=4 * EPS)
    np.testing.assert_allclose(out["clipped"], [0.6, 0, 0.8, 0], rtol=4 * EPS)


@pytest.mark.parametrize("clip_norm", [0, -1.0, float("nan"), True, "2", None])
def test_bad_clip_norm_leaves_the_graph_alone(clip_norm, fresh_graph):
    graph = mtf.Graph()
    grad = mtf.zeros(mtf.Mesh(graph, "mesh"), mtf.Shape([features]))
    before = len(graph.operations), len(fresh_graph.get_operations())
    with pytest.raises((ValueError, TypeError), match="clip_norm"):
        gs.clip_by_global_norm([grad], clip_norm)
    with pytest.raises((ValueError, TypeError), match="clip_norm"):
        gs.clip_by_shard_norm([grad], clip_norm, AXES)
    assert (len(graph.operations), len(fresh_graph.get_operations())) == before


def test_different_shard_dims_are_refused():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    grads = [mtf.zeros(mesh, mtf.Shape([batch])), mtf.zeros(mesh, mtf.Shape([features]))]
    with pytest.raises(ValueError, match="different shard dims"):
        gs.clip_by_shard_norm(grads, 1.0, AXES)


def test_no_gradients_no_norm():
    assert gs.clip_by_global_norm([None, None], 1.0) == ([None, None], None)
    assert gs.clip_by_shard_norm([], 1.0, AXES) == ([], None)


@pytest.mark.parametrize("value", [np.inf, 2e38], ids=["infinite", "the factor underflows"])
def test_gradients_without_a_norm_become_nan_not_zero(value):
    feed = inputs()
    feed["x"][0, 0] = value
    out = run("placement", lambda grads: gs.clip_by_global_norm(grads, 2.0), feed)
    assert np.isnan(out["x"]).all()
    assert np.isnan(out["h"]).all()


def two_losses(mesh):
    """Of one weight each, and of both."""
    x = mtf.import_tf_tensor(mesh, tf.ones([B, D]), mtf.Shape([batch, features]))
    weights = [
        mtf.get_variable(mesh, name, mtf.Shape([features]), initializer=tf.ones_initializer())
        for name in ("v", "w")
    ]
    losses = [mtf.reduce_sum(x * weight) for weight in weights]
    return losses, weights


def by_calls(clip):
    def clipped(losses, weights):
        return [clip([g]) for g in mtf.gradients([mtf.add(*losses)], weights)]

    return clipped


def by_wrappers(wrap):
    def clipped(losses, weights):
        loss = mtf.add(*losses)
        return [
            wrap(mtf.optimize.SgdOptimizer(1.0), weight.operation.name).minimize(
                loss, var_list=[weight]
            )
            for weight in weights
        ]

    return clipped


def clip_wrapper(opt, name):
    return gs.ClipByGlobalNormOptimizer(opt, 1.0, name=f"clip_{name}")


IN_GROUPS = {
    "global norm": by_calls(lambda g: gs.clip_by_global_norm(g, 1.0)),
    "shard norm": by_calls(lambda g: gs.clip_by_shard_norm(g, 1.0, AXES)),
    "summed together": lambda losses, weights: [
        gs.clip_by_global_norm([g], 1.0)
        for g in gs.sum_shards(mtf.gradients([mtf.add(*losses)], weights))
    ],
    "wrappers": by_wrappers(clip_wrapper),
    "once an update": by_wrappers(
        lambda opt, name: gs.GradientAccumulationOptimizer(
            clip_wrapper(opt, name), 2, axes=AXES, name=name
        )
    ),
    "per-shard losses": by_wrappers(
        lambda opt, name: gs.CrossShardOptimizer(clip_wrapper(opt, name), axes=AXES)
    ),
}


@pytest.mark.parametrize("how", list(IN_GROUPS))
def test_a_norm_for_each_of_two_groups_is_a_warning(how, caplog):
    losses, weights = two_losses(mtf.Mesh(mtf.Graph(), "mesh"))
    if how == "per-shard losses":
        shards = mtf.Shape([mtf.Dimension("batch", SHARDS)])
        losses = [mtf.broadcast(x, shards) for x in losses]
    IN_GROUPS[how](losses, weights)
    (record,) = [r for r in caplog.records if "neither is the norm of all" in r.getMessage()]
    assert "variable 'w' was clipped apart from the gradient of variable 'v'" in record.getMessage()


def one_each(losses, weights):
    for loss, weight in zip(losses, weights):
        gs.clip_by_global_norm(mtf.gradients([loss], [weight]), 1.0)


def again(losses, weights):
    grads, _ = gs.clip_by_global_norm(mtf.gradients([mtf.add(*losses)], weights), 1.0)
    gs.clip_by_global_norm(grads[:1], 0.5)


def nested(losses, weights):
    inner = clip_wrapper(mtf.optimize.SgdOptimizer(1.0), "inner")
    opt = gs.GradientAccumulationOptimizer(clip_wrapper(inner, "outer"), 2, axes=AXES)
    opt.minimize(mtf.add(*losses))


@pytest.mark.parametrize("clip", [one_each, again, nested])
def test_norms_that_are_meant_are_no_warning(clip, caplog):
    clip(*two_losses(mtf.Mesh(mtf.Graph(), "mesh")))
    assert "neither is the norm of all" not in caplog.text
