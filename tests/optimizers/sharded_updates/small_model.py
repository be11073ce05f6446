"""A model whose variables are split over the replicas in every way that there is."""

from __future__ import annotations

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models

BATCH, INPUTS, HIDDEN, CLASSES = 8, 8, 16, 12
# Variable -> its dimensions. On the mesh 4x2 the layout splits "hidden" over the model's axis.
SHAPES = {
    "w1": [("in", INPUTS), ("hidden", HIDDEN)],  # its first dimension is split over the replicas
    "w2": [("hidden", HIDDEN), ("out", CLASSES)],  # its second one
    "b1": [("hidden", HIDDEN)],  # whole where "hidden" is split already
    "b2": [("out", CLASSES)],
    "gain": [("out", CLASSES)],  # stacked with b2
    "odd": [("odd", 6)],  # not divisible by 4
    "scale": [],
}


def batches(steps, seed=1):
    rng = np.random.RandomState(seed)
    return [
        {
            "x": rng.randn(BATCH, INPUTS).astype("f"),
            "y": rng.randn(BATCH, CLASSES).astype("f"),
        }
        for _ in range(steps)
    ]


def initial_values(seed=0):
    rng = np.random.RandomState(seed)
    return {
        name: np.asarray(rng.standard_normal([size for _, size in dims]) * 0.4 + 0.5, "f")
        for name, dims in SHAPES.items()
    }


def loss_of(mesh, inputs, batch_dims=("batch",), dtype=tf.float32):
    dims = (
        [mtf.Dimension(batch_dims[0], BATCH)]
        if len(batch_dims) == 1
        else [mtf.Dimension(batch_dims[0], 2), mtf.Dimension(batch_dims[1], BATCH // 2)]
    )
    values = initial_values()
    at = {name: mtf.Dimension(name, size) for dims_ in SHAPES.values() for name, size in dims_}

    def variable(name):
        shape = mtf.Shape([mtf.Dimension(*dim) for dim in SHAPES[name]])
        initializer = tf.constant_initializer(values[name])
        return mtf.get_variable(mesh, name, shape, dtype, initializer=initializer)

    def given(name, dim):
        shape = mtf.Shape([*dims, dim])
        tensor = tf.reshape(inputs[name], shape.to_integer_list)
        x = mtf.import_tf_tensor(mesh, tensor, shape)
        activation = dtype.activation_dtype if isinstance(dtype, mtf.VariableDType) else dtype
        return mtf.cast(x, activation)

    x, y = given("x", at["in"]), given("y", at["out"])
    h = mtf.tanh(mtf.einsum([x, variable("w1")], [*dims, at["hidden"]]) + variable("b1"))
    out = mtf.einsum([h, variable("w2")], [*dims, at["out"]]) * variable("gain") + variable("b2")
    out *= variable("scale") * mtf.reduce_mean(variable("odd"))
    return mtf.cast(mtf.reduce_mean(mtf.square(out - y)), tf.float32)


def train(make, batch_dims=("batch",), dtype=tf.float32):
    """A `harness.Build` that takes a step with the optimizer that `make` makes."""

    def build(mesh, inputs):
        loss = loss_of(mesh, inputs, batch_dims, dtype)
        variables = mesh.graph.trainable_variables
        grads = mtf.gradients([loss], [v.value for v in variables])
        return make().apply_grads(grads, variables), {"loss": loss}

    return build


def sharded(opt, mesh, min_size=2, **kwargs):
    """The wrapper around an optimizer, on a mesh of the harness."""
    shape, layout, batch_dims = harness.MESHES[mesh]
    return gs.ShardedUpdateOptimizer(
        opt, min_size, mesh_shape=shape, layout=layout, batch_dims=batch_dims, **kwargs
    )


def run(kind, mesh, make, feeds, dtype=tf.float32, **kwargs):
    shape, layout, batch_dims = {"one": (*harness.ONE, ("batch",)), **harness.MESHES}[mesh]
    return harness.run(kind, shape, layout, train(make, batch_dims, dtype), feeds, **kwargs)


OPTIMIZERS = {
    **models.OPTIMIZERS,
    "mesh_adam": lambda: gs.MeshOptimizer(tf.train.AdamOptimizer(0.01)),
}
