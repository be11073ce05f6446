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


def parts(x):
    """Sums of the batch's contiguous parts."""
    return np.asarray(x, np.float64).reshape(4, len(x) // 4, *x.shape[1:]).sum(1)


def imported(mesh, x, *dims):
    return mtf.import_tf_tensor(mesh, x, mtf.Shape(list(dims)))


def pending(mesh, x, dims=(batch, features)):
    return mtf.reduce_sum(imported(mesh, x, *dims), reduced_dim=batch)


def microbatched(mesh, t):
    w = mtf.get_variable(mesh, "w", mtf.Shape([features]), initializer=tf.ones_initializer())
    x = {"x": imported(mesh, t, batch, features)}
    (got,), _ = mtf.serialize_training_step(
        x, lambda f: {"loss": mtf.reduce_sum(f["x"] * w)}, batch, 2
    )
    return got


def case(grad, expected=parts, shape=(B, D)):
    return shape, grad, expected


def of_shape(*rest):
    dims = [batch, *(mtf.Dimension(f"d{i}", n) for i, n in enumerate(rest))]
    return case(lambda mesh, t: pending(mesh, t, dims), shape=(B, *rest))


def kept(mesh, t):
    return mtf.slice(pending(mesh, t), 1, 2, "d")


def everywhere(mesh, t):
    total = mtf.reduce_sum(imported(mesh, t, batch, features))
    return mtf.broadcast(total, mtf.Shape([hidden, features]))


def over_both_axes(mesh, t):
    t = imported(mesh, t, batch, hidden, features)
    return mtf.reduce_sum(t, output_shape=mtf.Shape([features]))


PADDING = [[0, 0], [2, 1]]

# The shape of the data, the gradient that is made of them, and what shards have of it.
GRADIENTS = {
    "pending": case(pending),
    # A shard's gradient is its own part, not a share of a sum that was made before.
    "pad": case(
        lambda mesh, t: mtf.pad(pending(mesh, t), PADDING[1], "d"),
        lambda x: parts(np.pad(x, PADDING)),
    ),
    "slice": case(kept, lambda x: parts(x[:, 1:])),
    "slice and pad": case(
        lambda mesh, t: mtf.pad(kept(mesh, t), PADDING[1], "d"),
        lambda x: parts(np.pad(x[:, 1:], PADDING)),
    ),
    "split over a model axis": case(
        lambda mesh, t: pending(mesh, t, (batch, hidden)), shape=(B, H)
    ),
    "pending over axes beyond the replica axes": case(
        over_both_axes, lambda x: parts(x).sum(1), (B, H, D)
    ),
    "what has no batch is shared equally": case(
        lambda mesh, t: mtf.constant(mesh, 3.0, mtf.Shape([features])) * 2.0 + pending(mesh, t),
        lambda x: parts(x) + 6 / 4,
    ),
    "a tied variable adds up before it is reduced": case(
        lambda mesh, t: pending(mesh, t) + pending(mesh, 2 * t), lambda x: 3 * parts(x)
    ),
    "broadcast": case(
        everywhere, lambda x: np.broadcast_to(parts(x).sum(1)[:, None, None], (4, H, D))
    ),
    "microbatches": case(microbatched),
    "scalar": of_shape(),
    "size one": of_shape(1),
    "size zero": of_shape(0),
    "size zero in the middle": of_shape(0, 3),
}


def check(kind, gradients, axes=AXES, mesh=(MESH, LAYOUT), accept_summed=False):
    """Compares gradients per shard, their sums and the sums of what was given, in one program."""
    feed = {str(i): data(*shape) for i, (shape, *_) in enumerate(gradients.values())}

    def build(mtf_mesh, inputs):
        grads = [
            make(mtf_mesh, inputs[str(i)]) for i, (_, make, _) in enumerate(gradients.values())
        ]
        shards = gs.per_shard(grads, axes, accept_summed=accept_summed)
        fetches = {}
        stages = zip(grads, shards, gs.sum_shards(shards, axes), gs.sum_shards(grads, axes))
        for name, (grad, a, b, c) in zip(gradients, stages):
            assert a.shape.dims[: len(axes.shard_dims)] == list(axes.shard_dims)
            assert b.shape == c.shape == grad.shape
            fetches.update({(name, "shard"): a, (name, "sum"): b, (name, "direct"): c})
        return [], fetches

    found = harness.run(kind, *mesh, build, [feed]).fetched[0]
    for (name, (_, _, expected)), x in zip(gradients.items(), feed.values()):
        shards = expected(x)
        total = shards.sum(tuple(range(len(axes.shard_dims))))
        for stage, value in (("shard", shards), ("sum", total), ("direct", total)):
            actual = np.asarray(found[name, stage], np.float64)
            atol = 8 * EPS * np.max(np.abs(value), initial=1.0)
            np.testing.assert_allclose(actual, value, atol=atol, err_msg=f"{name}, {stage}")


def test_gradients_per_shard_and_summed(mesh_kind):
    check(mesh_kind, GRADIENTS)


def test_gradient_that_needs_the_sum_is_shared_equally_if_that_is_accepted(mesh_kind):
    def shares(x):
        return np.stack([x.sum(0, dtype=float) / 4] * 4)

    summed = case(lambda mesh, t: mtf.maximum(pending(mesh, t), -1e9), shares)
    check(mesh_kind, {"summed": summed}, accept_summed=True)


def test_gradient_that_needs_the_sum_is_refused_by_name():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    grad = mtf.maximum(pending(mesh, tf.zeros([B, D])), -1e9)
    with pytest.raises(
        ValueError, match=rf"gradient 0 .*: MinMaxOperation '{grad.operation.name}'"
    ):
        gs.per_shard([grad], AXES)


def test_gradient_that_is_scaled_between_two_replica_axes(mesh_kind):
    mesh = ("a:2;b:4", "outer:a;batch:b")
    axes = gs.ReplicaAxes(*mesh, batch_dims=("outer", "batch"))
    outer = mtf.Dimension("outer", 2)

    def grad(mesh, t):
        reduced = mtf.reduce_sum(imported(mesh, t, outer, batch, features), reduced_dim=outer)
        return mtf.reduce_sum(reduced * 0.5, reduced_dim=batch)

    halves = case(grad, lambda x: np.stack([parts(part) for part in x]) / 2, (2, B, D))
    check(mesh_kind, {"halves": halves}, axes, mesh)


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


DTYPES = {tf.bfloat16: 2**-8, tf.float64: 2**-52, tf.float32: EPS}


def test_dtypes(mesh_kind):
    x = data(B, D)

    def build(mesh, inputs):
        grads = [pending(mesh, tf.cast(inputs["x"], dtype)) for dtype in DTYPES]
        shards = gs.per_shard(grads, AXES)
        return [], {x.dtype.name: x for x in gs.sum_shards(shards, AXES)}

    found = harness.run(mesh_kind, MESH, LAYOUT, build, [{"x": x}]).fetched[0]
    for dtype, eps in DTYPES.items():
        expected = np.asarray(x, dtype.as_numpy_dtype).astype(float).sum(0)
        # Mesh-TF adds each processor's part in the tensor's dtype; float64 crosses a SIMD mesh as
        # float32.
        if dtype == tf.float64 and mesh_kind == "simd":
            eps = EPS
        actual = found[dtype.name]
        assert actual.dtype == dtype.as_numpy_dtype
        np.testing.assert_allclose(actual.astype(float), expected, atol=8 * eps * 4)


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
