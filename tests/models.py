"""Small models that the tests train."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf

BATCH, INPUTS, HIDDEN = 16, 6, 8

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: mtf.optimize.SgdOptimizer(0.1),
    "momentum": lambda: mtf.optimize.MomentumOptimizer(0.05, 0.9),
    "adam": lambda: mtf.optimize.AdamWeightDecayOptimizer(0.01, weight_decay_rate=0.01),
    "adafactor": lambda: mtf.optimize.AdafactorOptimizer(
        learning_rate=0.05, decay_rate=0.8, min_dim_size_to_factor=4
    ),
}


def mlp_values(seed: int = 0) -> dict[str, np.ndarray]:
    """Initial values of the model's variables."""
    rng = np.random.RandomState(seed)
    return {
        "w1": (rng.randn(INPUTS, HIDDEN) * 0.4).astype("f"),
        "b1": (rng.randn(HIDDEN) * 0.1).astype("f"),
        "scale": np.float32(1.5),
    }


def mlp_batches(steps: int, seed: int = 1) -> list[dict[str, np.ndarray]]:
    """Inputs and targets for some steps."""
    rng = np.random.RandomState(seed)
    return [
        {
            "x": rng.randn(BATCH, INPUTS).astype("f"),
            "y": rng.randn(BATCH, INPUTS).astype("f"),
        }
        for _ in range(steps)
    ]


def batch_shape(batch_dims: Sequence[str]) -> list[mtf.Dimension]:
    """The batch as one dimension, or cut in two for two batch dims."""
    if len(batch_dims) == 1:
        return [mtf.Dimension(batch_dims[0], BATCH)]
    return [mtf.Dimension(batch_dims[0], 4), mtf.Dimension(batch_dims[1], BATCH // 4)]


def mlp_loss(
    mesh: mtf.Mesh, inputs: dict[str, tf.Tensor], batch_dims: Sequence[str] = ("batch",)
) -> mtf.Tensor:
    """Mean squared error of an autoencoder with tied weights, a bias and a scalar: gradients that
    are pending over all, some and none of the mesh axes.
    """
    dims = batch_shape(batch_dims)
    x, y = (
        mtf.import_tf_tensor(
            mesh,
            tf.reshape(inputs[k], [d.size for d in dims] + [INPUTS]),
            mtf.Shape([*dims, mtf.Dimension(name, INPUTS)]),
        )
        for k, name in (("x", "in"), ("y", "in"))
    )
    hidden = mtf.Dimension("hidden", HIDDEN)
    features = mtf.Dimension("in", INPUTS)
    values = mlp_values()

    def variable(name: str, shape: Sequence[mtf.Dimension]) -> mtf.Tensor:
        initializer = tf.constant_initializer(values[name])
        return mtf.get_variable(mesh, name, mtf.Shape(list(shape)), initializer=initializer)

    w1 = variable("w1", [features, hidden])
    h = mtf.tanh(mtf.einsum([x, w1], [*dims, hidden]) + variable("b1", [hidden]))
    out = mtf.einsum([h, w1], [*dims, features]) * variable("scale", [])
    return mtf.reduce_mean(mtf.square(out - y))


def variable(mesh: mtf.Mesh, name: str, dims: Any, value: Any = 0, **kwargs: Any) -> mtf.Tensor:
    """A variable that begins with a value."""
    first = tf.constant_initializer(value)
    return mtf.get_variable(mesh, name, dims, initializer=first, **kwargs)


def gradients(loss: mtf.Tensor) -> tuple[list[mtf.Tensor], list[mtf.Variable]]:
    """Gradients by all trainable variables of the graph, and these."""
    variables = list(loss.graph.trainable_variables)
    return mtf.gradients([loss], [v.value for v in variables]), variables


def train(
    make: Callable[[], Any], batch_dims: Sequence[str] = ("batch",)
) -> Callable[[mtf.Mesh, dict[str, tf.Tensor]], tuple[list[Any], dict[str, mtf.Tensor]]]:
    """A `harness.Build` that takes a step of the model with the optimizer that `make` makes."""

    def build(
        mesh: mtf.Mesh, inputs: dict[str, tf.Tensor]
    ) -> tuple[list[Any], dict[str, mtf.Tensor]]:
        loss = mlp_loss(mesh, inputs, batch_dims)
        grads, variables = gradients(loss)
        return make().apply_grads(grads, variables), {"loss": loss}

    return build
