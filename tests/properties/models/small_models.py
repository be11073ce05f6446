"""Small models for a mesh (`m = mtf`) and for numpy (`m = tape`) alike, and their data."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from tests import models
from tests.properties.models import tape

IN, HIDDEN, VOCAB = mtf.Dimension("in", 4), mtf.Dimension("hidden", 4), mtf.Dimension("vocab", 5)
RANK, OTHER, ONE = mtf.Dimension("rank", 3), mtf.Dimension("other", 4), mtf.Dimension("one", 1)
FLOAT32, BFLOAT16 = 2.0**-23, 2.0**-8

Tensors = Dict[str, Any]


class Model(NamedTuple):
    """A loss, and the variables that it takes.

    Attributes:
      variables: dimensions by name.
      loss: of a module (`mtf` or `tape`), the variables' values, and the batch: "x" `[batch...,
        in]`, "y" `[batch..., hidden]`, "t" `[batch...]`, whole numbers below the size of VOCAB.
      positive: whether variables have to be greater than 0.
      eps: rounding of the narrowest dtype.
      dtype: of the variables.
      microbatches: parts of the batch that the step goes through one after the other.
      start: initial values; None for random ones between 0.3 and 1.3 in size.
    """

    variables: dict[str, Any]
    loss: Callable[[Any, Tensors, Tensors], Any]
    positive: bool = False
    eps: float = FLOAT32
    dtype: Any = tf.float32
    microbatches: int = 1
    start: dict[str, np.ndarray] | None = None

    def values(self) -> dict[str, np.ndarray]:
        """Initial values."""
        if self.start is not None:
            return self.start
        rng = np.random.RandomState(0)
        made = {}
        for name, dims in self.variables.items():
            shape = [d.size for d in dims]
            signs = 1 if self.positive else rng.choice([-1, 1], shape)
            made[name] = np.asarray(signs * rng.uniform(0.3, 1.3, shape), np.float32)
        return made


def batches(steps: int, seed: int = 1) -> list[dict[str, np.ndarray]]:
    """What is fed in each step."""
    rng = np.random.RandomState(seed)
    return [
        {
            "x": rng.uniform(-1, 1, [models.BATCH, IN.size]).astype("f"),
            "y": rng.uniform(-1, 1, [models.BATCH, HIDDEN.size]).astype("f"),
            "t": rng.randint(0, VOCAB.size, [models.BATCH]).astype(np.int32),
        }
        for _ in range(steps)
    ]


def on_mesh(mesh: mtf.Mesh, inputs: dict[str, tf.Tensor], batch_dims: Any) -> Tensors:
    """A batch as mtf tensors."""
    dims = models.batch_shape(batch_dims)
    rest = {"x": [IN], "y": [HIDDEN], "t": []}
    made = {}
    for name, own in rest.items():
        shape = mtf.Shape([*dims, *own])
        value = tf.reshape(inputs[name], shape.to_integer_list)
        made[name] = mtf.import_tf_tensor(mesh, value, shape)
    return made


def in_numpy(feed: dict[str, np.ndarray]) -> Tensors:
    """A batch, or a part of one, for `tape`."""
    batch = mtf.Dimension("batch", len(feed["x"]))
    shapes = {"x": [batch, IN], "y": [batch, HIDDEN], "t": [batch]}
    return {name: tape.Tensor(feed[name], shape) for name, shape in shapes.items()}


def batch_of(d: Tensors) -> list[mtf.Dimension]:
    """The batch dimensions."""
    return list(d["x"].shape.dims[:-1])


def squared_error(m: Any, predicted: Any, y: Any) -> Any:
    """The mean over the batch, in float32 whatever the prediction's dtype."""
    return m.reduce_mean(m.square(m.cast(predicted, tf.float32) - y))


def predict(m: Any, u: Any, d: Tensors) -> Any:
    """x times u, whose dimensions are among IN and HIDDEN."""
    x = m.cast(d["x"], u.dtype)
    rest = [dim for dim in u.shape.dims if dim != IN]
    if IN in u.shape.dims:
        return m.einsum([x, u], mtf.Shape([*batch_of(d), *rest]))
    return m.multiply(m.reduce_sum(x, reduced_dim=IN), u)


def regression(use: Callable[[Any, Tensors], Any], **kwargs: Any) -> Model:
    """The model mean(square(x * use(w) - y)).

    Args:
      use: makes a tensor of the variables, of dimensions among IN and HIDDEN.
      **kwargs: as for `Model`; variables are w of [IN, HIDDEN] if not given.
    """
    kwargs.setdefault("variables", {"w": [IN, HIDDEN]})
    return Model(loss=lambda m, v, d: squared_error(m, predict(m, use(m, v), d), d["y"]), **kwargs)


def together(members: dict[str, Model]) -> Model:
    """The sum of the losses of models without microbatches; variables are `<number>_<name>`."""
    numbered = [(f"{number}_", model) for number, model in enumerate(members.values())]

    def loss(m: Any, v: Tensors, d: Tensors) -> Any:
        return m.add_n(
            [
                model.loss(m, {name: v[prefix + name] for name in model.variables}, d)
                for prefix, model in numbered
            ]
        )

    return Model(
        {prefix + k: dims for prefix, model in numbered for k, dims in model.variables.items()},
        loss,
        start={prefix + k: v for prefix, model in numbered for k, v in model.values().items()},
    )
