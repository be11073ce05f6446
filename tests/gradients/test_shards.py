"""Gradients per shard and summed, against numpy in float64."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

EPS = np.finfo(np.float32).eps
MESH, LAYOUT = "rows:4;cols:2", "batch:rows;hidden:cols"
AXES = gs.ReplicaAxes(MESH, LAYOUT)
B, D, H = 8, 3, 4
batch, features, hidden = (
    mtf.Dimension("batch", B),
    mtf.Dimension("d", D),
    mtf.Dimension("hidden", H),
)


def data(*shape, seed=0, dtype="f"):
    return np.random.RandomState(seed).randn(*shape).astype(dtype)


def per_shard_reference(x, shards=4):
    """Sums of the batch's contiguous parts."""
    return np.asarray(x, np.float64).reshape(shards, -1, *x.shape[1:]).sum(1)


def stages(kind, make_grads, x, axes=AXES, mesh=(MESH, LAYOUT), accept_summed=False, **kwargs):
    """Fetches the gradients that make_grads(mesh, x) returns, per shard and summed."""

    def build(mtf_mesh, inputs):
        grads = make_grads(mtf_mesh, inputs["x"])
        shards = gs.per_shard(grads, axes, accept_summed=accept_summed)
        fetches = {}
        for i, (a, b, c) in enumerate(
            zip(shards, gs.sum_shards(shards, axes), gs.sum_shards(grads, axes))
        ):
            assert a.shape.dims[: len(axes.shard_dims)] == list(axes.shard_dims)
            assert b.shape == c.shape == grads[i].shape
            fetches.update({f"shard{i}": a, f"sum{i}": b, f"direct{i}": c})
        return [], fetches

    return harness.run(kind, *mesh, build, [{"x": x}], **kwargs).fetched[0]


def pending(mesh, x, dims=(batch, features)):
    return mtf.reduce_sum(mtf.import_tf_tensor(mesh, x, mtf.Shape(list(dims))), reduced_dim=batch)


def close(actual, expected, ulps=8):
    scale = np.max(np.abs(expected), initial=1.0)
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, atol=ulps * EPS * scale)


def test_pending_gradient(mesh_kind):
    x = data(B, D)
    out = stages(mesh_kind, lambda mesh, t: [pending(mesh, t)], x)
    close(out["shard0"], per_shard_reference(x))
    close(out["sum0"], x.astype(float).sum(0))
    close(out["direct0"], x.astype(float).sum(0))


@pytest.mark.parametrize("order", ["pad", "slice", "both"])
def test_gradient_of_a_slice_stays_pending(mesh_kind, order):
    """A shard's gradient is its own part, not a share of a sum that was made before."""
    x = data(B, D)

    def grads(mesh, t):
        grad = pending(mesh, t)
        if order != "pad":
            grad = mtf.slice(grad, 1, 2, "d")
        if order != "slice":
            grad = mtf.pad(grad, [2, 1], "d")
        return [grad]

    kept = x[:, 1:] if order != "pad" else x
    padded = np.pad(kept, [[0, 0], [2, 1]]) if order != "slice" else kept
    out = stages(mesh_kind, grads, x)
    close(out["shard0"], per_shard_reference(padded))
    close(out["sum0"], padded.astype(float).sum(0))
    close(out["direct0"], padded.astype(float).sum(0))


@pytest.mark.mostly_slow(keep="simd")
def test_gradient_split_over_a_model_axis(mesh_kind):
    x = data(B, H)
    out = stages(mesh_kind, lambda mesh, t: [pending(mesh, t, (batch, hidden))], x)
    close(out["shard0"], per_shard_reference(x))
    close(out["sum0"], x.astype(float).sum(0))


def test_gradient_pending_over_axes_beyond_the_replica_axes(mesh_kind):
    x = data(B, H, D)

    def grads(mesh, t):
        t = mtf.import_tf_tensor(mesh, t, mtf.Shape([batch, hidden, features]))
        return [mtf.reduce_sum(t, output_shape=mtf.Shape([features]))]

    out = stages(mesh_kind, grads, x)
    close(out["shard0"], per_shard_reference(x.sum(1, dtype=float)))
    close(out["direct0"], x.sum((0, 1), dtype=float))


def test_gradient_that_needs_the_sum_is_shared_equally_if_that_is_accepted(mesh_kind):
    x = data(B, D)

    def grads(mesh, t):
        return [mtf.maximum(pending(mesh, t), -1e9)]

    out = stages(mesh_kind, grads, x, accept_summed=True)
    total = x.sum(0, dtype=float)
    close(out["shard0"], np.stack([total / 4] * 4))
    close(out["sum0"], total)
    close(out["direct0"], total)


def test_gradient_that_needs_the_sum_is_refused_by_name():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    grad = mtf.maximum(pending(mesh, tf.zeros([B, D])), -1e9)
    with pytest.raises(
        ValueError, match=rf"gradient 0 .*: MinMaxOperation '{grad.operation.name}'"
    ):
        gs.per_shard([grad], AXES)


def test_gradient_without_the_batch_is_shared_equally(mesh_kind):
    x = data(B, D)

    def grads(mesh, t):
        return [mtf.constant(mesh, 3.0, mtf.Shape([features])) * 2.0 + pending(mesh, t)]

    out = stages(mesh_kind, grads, x)
    close(out["shard0"], per_shard_reference(x) + 6 / 4)
    close(out["direct0"], x.sum(0, dtype=float) + 6)


def test_gradient_that_is_scaled_between_two_replica_axes(mesh_kind):
    mesh = ("a:2;b:4", "outer:a;batch:b")
    axes = gs.ReplicaAxes(*mesh, batch_dims=("outer", "batch"))
    outer = mtf.Dimension("outer", 2)
    x = data(2, B, D)

    def grads(mesh, t):
        t = mtf.import_tf_tensor(mesh, t, mtf.Shape([outer, batch, features]))
        reduced = mtf.reduce_sum(t, reduced_dim=outer) * 0.5
        return [mtf.reduce_sum(reduced, reduced_dim=batch)]

    out = stages(mesh_kind, grads, x, axes, mesh)
    close(out["shard0"], np.stack([per_shard_reference(part) for part in x]) / 2)
    close(out["sum0"], x.sum((0, 1), dtype=float) / 2)


def test_tied_variable_adds_up_before_it_is_reduced(mesh_kind):
    x = data(B, D)
    out = stages(mesh_kind, lambda mesh, t: [pending(mesh, t) + pending(mesh, 2 * t)], x)
    close(out["shard0"], 3 * per_shard_reference(x))
    close(out["sum0"], 3 * x.sum(0, dtype=float))


def test_broadcast_gradient(mesh_kind):
    x = data(B, D)

    def grads(mesh, t):
        total = mtf.reduce_sum(mtf.import_tf_tensor(mesh, t, mtf.Shape([batch, features])))
        return [mtf.broadcast(total, mtf.Shape([hidden, features]))]

    out = stages(mesh_kind, grads, x)
    close(out["sum0"], np.full((H, D), x.sum(dtype=float)))


def test_gradient_of_an_experts_variable_keeps_its_split(mesh_kind):
    layout = LAYOUT + ";experts:rows"
    axes = gs.ReplicaAxes(MESH, layout)
    x = data(B, D)

    def build(mesh, inputs):
        experts = mtf.Dimension("experts", B)
        grad = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([experts, features]))
        (shard,) = gs.per_shard([grad], axes)
        (whole,) = gs.sum_shards([shard], axes)
        assert shard.shape == whole.shape == grad.shape
        return [], {"sum": whole}

    out = harness.run(mesh_kind, MESH, layout, build, [{"x": x}]).fetched[0]
    np.testing.assert_array_equal(out["sum"], x)


@pytest.mark.parametrize(
    "dtype", [tf.bfloat16, tf.float64, tf.float32], ids=lambda dtype: dtype.name
)
def test_dtypes(mesh_kind, dtype):
    x = data(B, D)

    def grads(mesh, t):
        return [pending(mesh, tf.cast(t, dtype))]

    out = stages(mesh_kind, grads, x)
    expected = np.asarray(x, dtype.as_numpy_dtype).astype(float).sum(0)
    # Mesh-TF adds each processor's part in the tensor's dtype; float64 crosses a SIMD mesh as
    # float32.
    eps = {tf.bfloat16: 2**-8, tf.float64: 2**-52, tf.float32: EPS}[dtype]
    if dtype == tf.float64 and mesh_kind == "simd":
        eps = EPS
    assert out["sum0"].dtype == dtype.as_numpy_dtype
    np.testing.assert_allclose(out["sum0"].astype(float), expected, atol=8 * eps * 4)


@pytest.mark.parametrize("shape", [(B,), (B, 1), (B, 0), (B, 0, 3)])
def test_scalars_size_one_and_zero_size(mesh_kind, shape):
    x = data(*shape)

    def grads(mesh, t):
        dims = [batch] + [mtf.Dimension(f"d{i}", n) for i, n in enumerate(shape[1:])]
        return [pending(mesh, t, dims)]

    out = stages(mesh_kind, grads, x)
    close(out["shard0"], per_shard_reference(x) if x.size else np.zeros((4, *shape[1:])))
    close(out["sum0"], x.sum(0, dtype=float))


def test_microbatched_gradients(mesh_kind):
    x = data(B, D)

    def grads(mesh, t):
        w = mtf.get_variable(mesh, "w", mtf.Shape([features]), initializer=tf.ones_initializer())
        t = mtf.import_tf_tensor(mesh, t, mtf.Shape([batch, features]))
        got, _ = mtf.serialize_training_step(
            {"x": t}, lambda f: {"loss": mtf.reduce_sum(f["x"] * w)}, batch, 2
        )
        return got

    out = stages(mesh_kind, grads, x)
    close(out["shard0"], per_shard_reference(x))
    close(out["direct0"], x.sum(0, dtype=float))


def test_none_passes_through_and_the_list_stays_as_it_was(fresh_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    grad = mtf.zeros(mesh, mtf.Shape([features]))
    grads = [None, grad, None]
    assert [g is None for g in gs.per_shard(grads, AXES)] == [True, False, True]
    assert [g is None for g in gs.sum_shards(grads, AXES)] == [True, False, True]
    assert grads == [None, grad, None]
    assert gs.per_shard([], AXES) == gs.sum_shards([], AXES) == []
    before = len(graph.operations)
    assert gs.sum_shards([None], AXES) == [None]
    assert len(graph.operations) == before


def test_per_shard_twice_is_per_shard():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    (shard,) = gs.per_shard([mtf.zeros(mesh, mtf.Shape([features]))], AXES)
    assert gs.per_shard([shard], AXES) == [shard]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g: gs.per_shard(g, AXES), "grads must be a list"),
        (lambda g: gs.per_shard([g, 3], AXES), r"grads\[1\] is 3"),
        (lambda g: gs.per_shard([g], "all:8"), "axes must be a ReplicaAxes"),
        (lambda g: gs.sum_shards([g], AXES, reducer="ring"), "reducer.*'ring'"),
        (lambda g: gs.sum_shards([g], AXES, reducer=gs.FusedAllReduce), "reducer"),
    ],
)
def test_wrong_types_are_named_and_leave_the_graph_alone(call, words, fresh_graph):
    graph = mtf.Graph()
    grad = mtf.zeros(mtf.Mesh(graph, "mesh"), mtf.Shape([features]))
    with harness.unchanged(graph), pytest.raises(TypeError, match=words):
        call(grad)
