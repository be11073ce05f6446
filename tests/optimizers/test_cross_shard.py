"""What CrossShardOptimizer does with losses, gradients and groups, against numpy in float64."""

import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models

EPS = np.finfo(np.float32).eps
LR = 0.5
B, D = 8, 3
SUM, MEAN = tf.losses.Reduction.SUM, tf.losses.Reduction.MEAN
MESH = ("rows:4;cols:2", "batch:rows;d:cols")
GROUPS = {
    "contiguous": [[0, 1], [2, 3]],
    "strided": [[0, 2], [1, 3]],
    "arbitrary": [[3, 0], [1, 2]],
}


def sgd(**kwargs):
    return gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(LR), **kwargs)


def examples(seed=0, shards=B):
    rng = np.random.RandomState(seed)
    return {"x": rng.randn(shards, D).astype("f"), "y": rng.randn(shards).astype("f")}


W = np.array([0.5, -1.0, 2.0], "f")


def residual_and_grad(feed, w):
    """Per-example losses r^2 and their gradients 2 r x, in float64."""
    x, y = feed["x"].astype(float), feed["y"].astype(float)
    r = np.sum(x * w, -1) - y
    return r**2, 2 * r[:, None] * x


def shard_losses(mesh, inputs, shape, own_copies=False, batch=B):
    """One loss for each entry of the batch dimension; w shared, or one copy a shard."""
    b, d = mtf.Dimension("batch", batch), mtf.Dimension("features", D)
    x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([b, d]))
    y = mtf.import_tf_tensor(mesh, inputs["y"], mtf.Shape([b]))
    of_w = mtf.Shape([b, d] if own_copies else [d])
    start = np.broadcast_to(W, of_w.to_integer_list)
    w = mtf.get_variable(mesh, "w", of_w, initializer=tf.constant_initializer(start))
    loss = mtf.square(mtf.reduce_sum(x * w, reduced_dim=d) - y)
    return loss if shape is None else mtf.reduce_sum(loss, output_shape=mtf.Shape(shape))


def train(kind, mesh, layout, make, feed, own_copies=False, batch=B, keep=True, **kwargs):
    def build(mtf_mesh, inputs):
        loss = shard_losses(mtf_mesh, inputs, None if keep else [], own_copies, batch)
        return make().minimize(loss), {}

    return harness.run(kind, mesh, layout, build, [feed], **kwargs).variables["w"]


@pytest.mark.parametrize("reduction", [SUM, MEAN])
@pytest.mark.parametrize("mesh", ["all:8", "all:4", "one:1"])
def test_one_loss_per_shard(mesh_kind, mesh, reduction):
    """With fewer processors than shards, each holds several."""
    feed = examples()
    w = train(mesh_kind, mesh, "batch:all", lambda: sgd(reduction=reduction), feed)
    grad = residual_and_grad(feed, W)[1].sum(0) / (B if reduction == MEAN else 1)
    np.testing.assert_allclose(w, W - LR * grad, rtol=32 * EPS, atol=64 * EPS)


@pytest.mark.parametrize("reduction", [SUM, MEAN])
def test_a_scalar_is_the_loss_of_all_shards_and_not_scaled(reduction, caplog):
    feed = examples()
    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        w = train(
            "placement", "all:8", "batch:all", lambda: sgd(reduction=reduction), feed, keep=False
        )
    grad = residual_and_grad(feed, W)[1].sum(0)
    np.testing.assert_allclose(w, W - LR * grad, rtol=32 * EPS, atol=64 * EPS)
    assert not [r for r in caplog.records if r.name.startswith("mtf_gradsync")]


def test_a_scalar_is_warned_of_once_where_the_mesh_was_given(caplog):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    w = mtf.get_variable(mesh, "w", [mtf.Dimension("rows", 4)])
    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        for _ in range(2):
            sgd(mesh_shape="all:8", layout="batch:all").compute_gradients(mtf.reduce_sum(w))
    (warning,) = [r.getMessage() for r in caplog.records if "num_shards is 1" in r.getMessage()]
    assert warning.endswith("not scaled.")


def test_a_loss_with_other_dims_only_is_warned_of_once(caplog):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    w = mtf.get_variable(mesh, "w", [mtf.Dimension("rows", 4)])
    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        for _ in range(2):
            sgd().compute_gradients(mtf.square(w))
    (warning,) = [r.getMessage() for r in caplog.records if "num_shards is 1" in r.getMessage()]
    assert "Shape[rows=4]" in warning
    assert "['batch'], so" in warning


@pytest.mark.parametrize("groups", [None, *sorted(GROUPS)])
@pytest.mark.parametrize("reduction", [SUM, MEAN])
def test_own_copies_get_the_sum_of_their_group(mesh_kind, groups, reduction):
    assignment = groups and GROUPS[groups]
    feed = {"x": examples()["x"][:4], "y": examples()["y"][:4]}
    w = train(
        mesh_kind,
        *MESH,
        lambda: sgd(reduction=reduction, group_assignment=assignment),
        feed,
        own_copies=True,
        batch=4,
    )
    grads = residual_and_grad(feed, W)[1]
    expected = np.empty((4, D))
    for group in assignment or [[0, 1, 2, 3]]:
        total = grads[group].sum(0) / (len(group) if reduction == MEAN else 1)
        expected[group] = W - LR * total
    np.testing.assert_allclose(w, expected, rtol=32 * EPS, atol=64 * EPS)


def test_per_shard_gradients_are_summed_away(mesh_kind):
    """Clipped shard by shard between compute_gradients and apply_gradients."""
    feed = examples()
    feed["x"][0] *= 50
    axes = gs.ReplicaAxes("all:8", "batch:all")

    def build(mesh, inputs):
        optimizer = sgd(reduction=MEAN, axes=axes)
        pairs = optimizer.compute_gradients(shard_losses(mesh, inputs, None))
        grads, norms = gs.clip_by_shard_norm([g for g, _ in pairs], 0.25, axes)
        clipped = list(zip(grads, [v for _, v in pairs]))
        return optimizer.apply_gradients(clipped), {"norms": norms}

    result = harness.run(mesh_kind, "all:8", "batch:all", build, [feed])
    grads = residual_and_grad(feed, W)[1] / B  # scaled before clipping, by MEAN
    norms = np.linalg.norm(grads, axis=1)
    clipped = grads * np.minimum(1, 0.25 / norms)[:, None]
    np.testing.assert_allclose(result.fetched[0]["norms"], norms, rtol=32 * EPS)
    expected = W - LR * clipped.sum(0)
    np.testing.assert_allclose(result.variables["w"], expected, rtol=32 * EPS, atol=32 * EPS)


@pytest.mark.mostly_slow(keep="placement")
def test_an_experts_variable_is_left_split(mesh_kind):
    """A variable split over the replica axis under another name has its sums already."""
    feed = {"x": examples()["x"]}
    experts, d, rest = (
        mtf.Dimension("experts", 4),
        mtf.Dimension("features", D),
        mtf.Dimension("rest", 2),
    )

    def build(mesh, inputs):
        batch = mtf.Dimension("batch", B)
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, d]))
        x = mtf.replace_dimensions(x, batch, [experts, rest])
        start = np.broadcast_to(W, (4, D))
        w = models.variable(mesh, "w", [experts, d], start)
        loss = mtf.reduce_sum(x * w)
        return sgd(mesh_shape=MESH[0], layout="batch:rows;experts:rows").minimize(loss), {}

    w = harness.run(mesh_kind, MESH[0], "batch:rows;experts:rows", build, [feed]).variables["w"]
    grads = feed["x"].astype(float).reshape(4, 2, D).sum(1)
    np.testing.assert_allclose(w, W - LR * grads, rtol=8 * EPS, atol=8 * EPS)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16 activations"])
def test_dtypes_of_variables(mesh_kind, dtype):
    feed = examples()
    half = dtype != "float64"
    variable_dtype = (
        mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)
        if half
        else mtf.VariableDType(tf.float64, tf.float64, tf.float64)
    )

    def build(mesh, inputs):
        b, d = mtf.Dimension("batch", B), mtf.Dimension("features", D)
        activation = variable_dtype.activation_dtype
        x = mtf.import_tf_tensor(mesh, tf.cast(inputs["x"], activation), mtf.Shape([b, d]))
        w = models.variable(mesh, "w", [d], W, dtype=variable_dtype)
        return sgd().minimize(mtf.reduce_sum(x * w)), {}

    w = harness.run(mesh_kind, "all:8", "batch:all", build, [feed]).variables["w"]
    assert w.dtype == (np.float32 if half else np.float64)
    expected = W - LR * feed["x"].astype(float).sum(0)
    # bfloat16: inputs rounded to 8 bits, sums of 8 rounded again. float64 crosses a SIMD mesh as
    # float32.
    tolerance = 2**-8 * 8 if half else (8 * EPS if mesh_kind == "simd" else 1e-14)
    np.testing.assert_allclose(w, expected, atol=tolerance)


def test_two_shard_dims_number_the_shards_in_the_order_of_batch_dims(mesh_kind):
    groups = [[0, 5, 2, 7], [1, 4, 3, 6]]
    grads = np.random.RandomState(0).randn(2, 4, D).astype("f")
    dims = [mtf.Dimension("batch", 4), mtf.Dimension("d", D), mtf.Dimension("outer", 2)]

    def build(mesh, inputs):
        w = mtf.get_variable(mesh, "w", mtf.Shape(dims), initializer=tf.zeros_initializer())
        grad = mtf.import_tf_tensor(mesh, tf.transpose(inputs["g"], [1, 2, 0]), mtf.Shape(dims))
        optimizer = sgd(group_assignment=groups, batch_dims=("outer", "batch"))
        return optimizer.apply_grads([grad], [w.operation]), {}

    layout = "outer:a;batch:b"
    w = harness.run(mesh_kind, "a:2;b:4", layout, build, [{"g": grads}]).variables["w"]
    flat = grads.reshape(8, D).astype(float)
    expected = np.empty((8, D))
    for group in groups:
        expected[group] = -LR * flat[group].sum(0)
    expected = np.transpose(expected.reshape(2, 4, D), [1, 2, 0])
    np.testing.assert_allclose(w, expected, rtol=8 * EPS, atol=8 * EPS)


class TestErrors:
    """Each leaves the mtf graph and the TF graph as they were."""

    def model(self, own_copies=False):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        batch, d = mtf.Dimension("batch", 4), mtf.Dimension("features", D)
        shape = mtf.Shape([batch, d] if own_copies else [d])
        variable = mtf.get_variable(mesh, "w", shape, initializer=tf.zeros_initializer())
        return mesh, mtf.ones(mesh, shape), variable.operation

    def check(self, mesh, call, words, error=ValueError):
        with harness.unchanged(mesh.graph), pytest.raises(error, match=words):
            call()

    def test_groups_that_do_not_fit_the_mesh(self):
        mesh, grad, variable = self.model(own_copies=True)
        optimizer = sgd(group_assignment=[[0, 1], [2]])  # the mesh is not known yet
        self.check(mesh, lambda: optimizer.apply_grads([grad], [variable]), "missing")
        loss = mtf.ones(mesh, mtf.Shape([mtf.Dimension("batch", 4)]))
        self.check(mesh, lambda: optimizer.compute_gradients(loss), "missing")

    def test_groups_on_a_variable_that_all_shards_share(self):
        mesh, grad, variable = self.model()
        optimizer = sgd(group_assignment=GROUPS["strided"])
        self.check(mesh, lambda: optimizer.apply_grads([grad], [variable]), "all shards share.*'w'")

    def test_a_gradient_of_the_wrong_shape(self):
        mesh, _grad, variable = self.model()
        wrong = mtf.ones(mesh, mtf.Shape([mtf.Dimension("features", D + 1)]))
        self.check(mesh, lambda: sgd().apply_grads([wrong], [variable]), "'w' has shape")

    def test_a_per_shard_gradient_without_its_name(self):
        mesh, _, variable = self.model()
        wrong = mtf.ones(mesh, mtf.Shape([mtf.Dimension("shard", 4), *variable.shape.dims]))
        self.check(mesh, lambda: sgd().apply_grads([wrong], [variable]), "shard dims")

    def test_a_variable_with_some_of_the_shard_dims(self):
        mesh, grad, variable = self.model(own_copies=True)
        optimizer = sgd(
            mesh_shape="a:2;b:4", layout="outer:a;batch:b", batch_dims=("outer", "batch")
        )
        self.check(mesh, lambda: optimizer.apply_grads([grad], [variable]), "either all")


def test_axes_of_another_mesh_are_noticed_when_lowering():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    grads = [mtf.ones(mesh, mtf.Shape([mtf.Dimension("d", 4)]))]
    gs.clip_by_shard_norm(grads, 1.0, gs.ReplicaAxes("all:8", "batch:all"))
    with pytest.raises(ValueError, match="lowered on mesh"):
        mtf.Lowering(mesh.graph, {mesh: harness.placement("all:4", "batch:all")})
