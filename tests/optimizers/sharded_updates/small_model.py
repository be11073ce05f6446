"""A model whose variables are split over the replicas in every way that there is."""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh import devices
from tests import harness, models

# Parts, halves or quarters, have 16 elements or a multiple. TensorFlow's CPU kernel of the
# reciprocal, by which Mesh-TF divides, gives the last elements of a tensor, which fill no vector of
# the processor, other bits than it gives them elsewhere.
BATCH, INPUTS, HIDDEN, CLASSES = 8, 8, 64, 64
# Variable -> its dimensions. On meshes of two axes the layout splits "hidden" over the second.
SHAPES = {
    "w1": [("in", INPUTS), ("hidden", HIDDEN)],  # its first dimension is split over the replicas
    "w2": [("hidden", HIDDEN), ("out", CLASSES)],  # its second one
    "b1": [("hidden", HIDDEN)],  # not split where "hidden" is split already
    "b2": [("out", CLASSES)],
    "gain": [("out", CLASSES)],  # stacked with b2
    "odd": [("odd", 7)],  # not divisible
    "scale": [],
}
# One variable for each way, where stacked variables and scalars are not the point.
FEW = ("w1", "w2", "b2", "odd")
EXPERTS = {
    "gate": [("in", INPUTS), ("choices", 4)],
    "experts": [("experts", 4), ("in", INPUTS), ("hidden", HIDDEN)],  # split over the replicas
}
MESHES = {name: (shape, layout, dims) for name, (shape, layout, dims) in harness.MESHES.items()}
MESHES["one"] = (*harness.ONE, ("batch",))
MESHES["experts"] = ("rows:2;cols:2", "batch:rows;hidden:cols;experts:rows", ("batch",))


def batches(steps, seed=1):
    rng = np.random.RandomState(seed)
    return [
        {
            "x": rng.randn(BATCH, INPUTS).astype("f"),
            "y": rng.randn(BATCH, CLASSES).astype("f"),
        }
        for _ in range(steps)
    ]


def initial_values(shapes, seed=0):
    rng = np.random.RandomState(seed)
    return {
        name: np.asarray(rng.standard_normal([size for _, size in dims]) * 0.2 + 0.3, "f")
        for name, dims in shapes.items()
    }


def loss_of(
    mesh, inputs, batch_dims=("batch",), dtype=tf.float32, with_experts=False, names=tuple(SHAPES)
):
    dims = (
        [mtf.Dimension(batch_dims[0], BATCH)]
        if len(batch_dims) == 1
        else [mtf.Dimension(batch_dims[0], 2), mtf.Dimension(batch_dims[1], BATCH // 2)]
    )
    shapes = {**{name: SHAPES[name] for name in names}, **(EXPERTS if with_experts else {})}
    values = initial_values(shapes)
    at = {name: mtf.Dimension(name, size) for dims_ in shapes.values() for name, size in dims_}

    def variable(name):
        if name not in shapes:
            return 0.0 if name.startswith("b") else 1.0
        shape = mtf.Shape([mtf.Dimension(*dim) for dim in shapes[name]])
        initializer = tf.constant_initializer(values[name])
        return mtf.get_variable(mesh, name, shape, dtype, initializer=initializer)

    def given(name, dim):
        shape = mtf.Shape([*dims, dim])
        tensor = tf.reshape(inputs[name], shape.to_integer_list)
        x = mtf.import_tf_tensor(mesh, tensor, shape)
        activation = dtype.activation_dtype if isinstance(dtype, mtf.VariableDType) else dtype
        return mtf.cast(x, activation)

    def mixture(x):
        """All experts receive each example, weighted by its gates; replicas hold the experts."""
        tokens = mtf.Dimension("tokens", BATCH)
        gates = mtf.softmax(
            mtf.einsum([x, variable("gate")], [*dims, at["choices"]]), at["choices"]
        )
        sent = mtf.reshape(gates * x, mtf.Shape([tokens, at["experts"], at["in"]]))
        made = mtf.einsum([sent, variable("experts")], [tokens, at["experts"], at["hidden"]])
        back = mtf.reshape(made, mtf.Shape([*dims, at["choices"], at["hidden"]]))
        return mtf.reduce_sum(back, reduced_dim=at["choices"])

    x, y = given("x", at["in"]), given("y", at["out"])
    h = mtf.einsum([x, variable("w1")], [*dims, at["hidden"]]) + variable("b1")
    h = mtf.tanh(h + mixture(x) if with_experts else h)
    out = mtf.einsum([h, variable("w2")], [*dims, at["out"]]) * variable("gain") + variable("b2")
    out *= variable("scale") * mtf.reduce_mean(variable("odd"))
    return mtf.cast(mtf.reduce_mean(mtf.square(out - y)), tf.float32)


def train(make, batch_dims=("batch",), dtype=tf.float32, with_experts=False, names=tuple(SHAPES)):
    """A `harness.Build` that takes a step with the optimizer that `make` makes."""

    def build(mesh, inputs):
        loss = loss_of(mesh, inputs, batch_dims, dtype, with_experts, names)
        grads, variables = models.gradients(loss)
        return make().apply_grads(grads, variables), {"loss": loss}

    return build


def sharded(opt, mesh, min_size=2, **kwargs):
    """The wrapper around an optimizer, on a mesh of the harness."""
    shape, layout, batch_dims = MESHES[mesh]
    return gs.ShardedUpdateOptimizer(
        opt, min_size, mesh_shape=shape, layout=layout, batch_dims=batch_dims, **kwargs
    )


@contextlib.contextmanager
def memories_of(kind):
    """The kind of mesh for the harness; of "own memories" each device has its own.

    On a placement mesh of one memory the wrapper does not split variables.
    """
    if kind != "own memories":
        yield kind
        return
    with mock.patch.object(devices, "_memory", lambda device: device):
        yield "placement"


def built(kind, mesh, make, feed, dtype=tf.float32, names=tuple(SHAPES), **kwargs):
    """The program of a step, as `harness.built`."""
    shape, layout, batch_dims = MESHES[mesh]
    build = train(make, batch_dims, dtype, mesh == "experts", names)
    with memories_of(kind) as kind:
        return harness.built(kind, shape, layout, build, feed, **kwargs)


def run(kind, mesh, make, feeds, dtype=tf.float32, **kwargs):
    """A run of a step for each feed, as `harness.run`."""
    return built(kind, mesh, make, feeds[0], dtype, **kwargs).run(feeds)


OPTIMIZERS = {
    **models.OPTIMIZERS,
    "mesh_adam": lambda: gs.MeshOptimizer(tf.train.AdamOptimizer(0.01)),
}


@functools.lru_cache(maxsize=None)
def on_one(optimizer, names=tuple(SHAPES)):
    """The program of one processor, whose runs those of meshes are compared with."""
    make = lambda: gs.CrossShardOptimizer(OPTIMIZERS[optimizer]())  # noqa: E731
    return built("placement", "one", make, batches(1)[0], names=names)


def assert_close(actual, expected, tolerance):
    """Values by name, each within a tolerance, absolute and relative."""
    assert sorted(actual) == sorted(expected)
    for name in expected:
        assert actual[name].shape == expected[name].shape, name
        np.testing.assert_allclose(
            actual[name].astype("d"), expected[name].astype("d"), rtol=tolerance, atol=tolerance,
            err_msg=name,
        )  # fmt: skip


def assert_same_bits(actual, expected):
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        different = np.count_nonzero(actual[name] != value)
        assert actual[name].tobytes() == value.tobytes(), f"{name}: {different} of {value.size}"
