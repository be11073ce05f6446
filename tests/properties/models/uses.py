"""Ways to use a variable, each a small model."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from tests.properties.models import tape
from tests.properties.models.small_models import (
    BFLOAT16,
    HIDDEN,
    IN,
    ONE,
    OTHER,
    RANK,
    VOCAB,
    Model,
    Tensors,
    batch_of,
    predict,
    regression,
    squared_error,
)

W = [IN, HIDDEN]


def mask(m: Any, like: Any) -> Any:
    """A constant of zeros and ones."""
    holes = np.arange(like.shape.size).reshape(like.shape.to_integer_list) % 3 == 0
    return m.import_tf_tensor(like.mesh, holes, like.shape)


def _two(first: Any, second: Any, name: str = "b") -> dict[str, Any]:
    return {"w": first, name: second}


TWO, WITH_SCALAR = _two(W, W), _two(W, [], "s")

# The seventeen that were tried first.
FIRST = {
    "cast": regression(lambda m, v: m.cast(v["w"], tf.bfloat16), eps=BFLOAT16),
    "-w": regression(lambda m, v: -v["w"]),
    "2 * w": regression(lambda m, v: 2.0 * v["w"]),
    "w / 3": regression(lambda m, v: v["w"] / 3.0),
    "1 - w": regression(lambda m, v: 1.0 - v["w"]),
    "w + 1": regression(lambda m, v: v["w"] + 1.0),
    "w - 1": regression(lambda m, v: v["w"] - 1.0),
    "w + b": regression(lambda m, v: v["w"] + v["b"], variables=TWO),
    "w - b": regression(lambda m, v: v["w"] - v["b"], variables=TWO),
    "w * s": regression(lambda m, v: v["w"] * v["s"], variables=WITH_SCALAR),
    "w / s": regression(lambda m, v: v["w"] / v["s"], variables=WITH_SCALAR),
    "square": regression(lambda m, v: m.square(v["w"])),
    "exp": regression(lambda m, v: m.exp(v["w"])),
    "relu": regression(lambda m, v: m.relu(v["w"])),
    "softmax": regression(lambda m, v: m.softmax(v["w"], IN)),
    "sigmoid": regression(lambda m, v: m.sigmoid(v["w"])),
    "square(c - w)": regression(lambda m, v: m.square(0.5 - v["w"])),
}


def _chosen(m: Any, v: Tensors) -> Any:
    return m.where(mask(m, v["w"]), m.square(v["w"]), v["b"])


ENTRYWISE = {
    "tanh": regression(lambda m, v: m.tanh(v["w"])),
    "softplus": regression(lambda m, v: m.softplus(v["w"])),
    "sin": regression(lambda m, v: m.sin(v["w"])),
    "log": regression(lambda m, v: m.log(v["w"]), positive=True),
    "sqrt": regression(lambda m, v: m.sqrt(v["w"]), positive=True),
    "rsqrt": regression(lambda m, v: m.rsqrt(v["w"]), positive=True),
    "1 / w": regression(lambda m, v: 1.0 / v["w"], positive=True),
    "cast to float64": regression(lambda m, v: m.cast(v["w"], tf.float64)),
    "cast there and back": regression(
        lambda m, v: m.cast(m.cast(v["w"], tf.bfloat16), tf.float32), eps=BFLOAT16
    ),
    "identity": regression(lambda m, v: m.identity(v["w"])),
    "softmax over a split dimension": regression(lambda m, v: m.softmax(v["w"], HIDDEN)),
    "where": regression(_chosen, variables=TWO),
    "mask": regression(lambda m, v: m.where(mask(m, v["w"]), -v["w"], v["w"])),
    "two of one": regression(lambda m, v: v["w"] * v["w"]),
    "square of a product": regression(
        lambda m, v: m.square(v["w"] * v["b"]) - v["w"], variables=TWO
    ),
}


def _reshaped(m: Any, v: Tensors) -> Any:
    pairs = mtf.Shape([mtf.Dimension("a", 2), mtf.Dimension("c", 2), HIDDEN])
    return m.reshape(-m.reshape(v["w"], pairs), mtf.Shape(W))


def _stacked(m: Any, v: Tensors) -> Any:
    rows = m.unstack(v["w"], IN)
    return m.stack([rows[3], -rows[0], 2.0 * rows[1], rows[2] - rows[0]], "in")


def _split(m: Any, v: Tensors) -> Any:
    first, second = m.split(v["w"], IN, [1, 3])
    return m.concat([second * 2.0, -first], "in")


def _concatenated(m: Any, v: Tensors) -> Any:
    return m.concat([v["w"], -v["b"], m.pad(v["s"] * v["s"], [0, 1], "in")], "in")


def _positions(m: Any, v: Tensors) -> Any:
    part = m.slice(v["w"], 1, 3, "in")
    return m.pad(part, [1, 0], "in") * 0.2


def _rows(number: int) -> list[mtf.Dimension]:
    return [mtf.Dimension("in", number), HIDDEN]


SHAPES = {
    "transpose": regression(
        lambda m, v: m.transpose(v["w"], mtf.Shape(W)), variables={"w": [HIDDEN, IN]}
    ),
    "transpose of two": regression(
        lambda m, v: m.transpose(v["w"], mtf.Shape(W)) * v["s"],
        variables=_two([HIDDEN, IN], [], "s"),
    ),
    "reshape": regression(_reshaped),
    "from one row": regression(
        lambda m, v: m.reshape(2.0 * v["w"], mtf.Shape(W)),
        variables={"w": [mtf.Dimension("row", 16)]},
    ),
    "renamed": regression(
        lambda m, v: -m.rename_dimension(v["w"], "rows_of_w", "in"),
        variables={"w": [mtf.Dimension("rows_of_w", 4), HIDDEN]},
    ),
    "split by renaming": regression(
        lambda m, v: m.rename_dimension(2.0 * v["w"], "other", "hidden"),
        variables={"w": [IN, OTHER]},
    ),
    "whole by renaming": regression(
        lambda m, v: m.broadcast(
            m.rename_dimension(m.square(v["w"]), "hidden", "in"), mtf.Shape(W)
        ),
        variables={"w": [HIDDEN]},
    ),
    "split by broadcast of a vector": regression(
        lambda m, v: m.broadcast(2.0 * v["w"], mtf.Shape(W)), variables={"w": [IN]}
    ),
    "broadcast of a vector": regression(
        lambda m, v: m.broadcast(-v["w"], mtf.Shape(W)), variables={"w": [HIDDEN]}
    ),
    "broadcast of a scalar": regression(
        lambda m, v: m.broadcast(m.square(v["w"]), mtf.Shape(W)), variables={"w": []}
    ),
    "size 1": regression(lambda m, v: -m.reshape(v["w"], mtf.Shape([])), variables={"w": [ONE]}),
    "concat": regression(_concatenated, variables={"w": _rows(1), "b": _rows(1), "s": _rows(1)}),
    "split": regression(_split),
    "stack": regression(_stacked),
    "positions": regression(_positions, variables={"w": _rows(6)}),
    "cumsum": regression(lambda m, v: m.cumsum(v["w"], IN)),
}


def _on_two_axes(m: Any, v: Tensors, d: Tensors) -> Any:
    """s meets HIDDEN, which is split, in one term and not in the other."""
    one = squared_error(m, predict(m, v["w"] * m.square(v["s"]), d), d["y"])
    other = m.reduce_mean(m.square(predict(m, 1.0 - v["s"], d)))
    return one + other


def _broadcast_over_the_batch(m: Any, v: Tensors, d: Tensors) -> Any:
    """The sum over the batch comes before w's own operations in the backward pass, not last."""
    wide = m.broadcast(-v["w"], mtf.Shape([batch_of(d)[-1], *W]))
    predicted = m.einsum([d["x"], wide], mtf.Shape([*batch_of(d), HIDDEN]))
    return squared_error(m, predicted, d["y"])


SUMS = {
    "sum over IN": regression(lambda m, v: m.reduce_sum(v["w"], reduced_dim=IN)),
    "sum over a split dimension": regression(lambda m, v: m.reduce_sum(v["w"], reduced_dim=HIDDEN)),
    "mean": regression(lambda m, v: v["w"] - m.reduce_mean(v["w"])),
    "product of two": regression(
        lambda m, v: m.einsum([v["w"], v["b"]], mtf.Shape(W)),
        variables=_two([IN, RANK], [RANK, HIDDEN]),
    ),
    "product over a split dimension": regression(
        lambda m, v: m.einsum([v["w"], v["b"]], mtf.Shape([IN])),
        variables=_two(W, W),
    ),
    "product of three": regression(
        lambda m, v: m.einsum([v["w"], v["b"], v["s"]], mtf.Shape(W)),
        variables={"w": [IN, RANK], "b": [RANK, HIDDEN], "s": [RANK]},
    ),
    "normalized": regression(
        lambda m, v: v["w"] * m.rsqrt(m.reduce_mean(m.square(v["w"]), output_shape=mtf.Shape([IN])))
    ),
    "shared": regression(
        lambda m, v: 2.0 * v["w"] + m.tanh(v["w"]) - m.square(v["w"]) * v["b"], variables=TWO
    ),
    "shared with a cast": regression(
        lambda m, v: v["w"] * 0.5 + m.cast(m.cast(v["w"], tf.bfloat16), tf.float32), eps=BFLOAT16
    ),
    "pending over two sets of axes": Model(_two(W, [IN], "s"), _on_two_axes),
    "pending over two sets of axes, scalar": Model(_two(W, [], "s"), _on_two_axes),
    "broadcast over the batch": Model({"w": W}, _broadcast_over_the_batch),
}


def _embedding(m: Any, v: Tensors, d: Tensors) -> Any:
    """Tied: the table looks up, scaled, and makes logits."""
    e = m.gather(v["table"] * 2.0, d["t"], VOCAB)
    scores = m.einsum([e, v["table"]], mtf.Shape([*batch_of(d), VOCAB]))
    return squared_error(m, e, d["y"]) + m.reduce_mean(m.square(scores - 1.0))


def _layer_norm(m: Any, v: Tensors, d: Tensors) -> Any:
    h = predict(m, v["w"], d)
    rows = mtf.Shape(batch_of(d))
    h -= m.reduce_mean(h, output_shape=rows)
    variance = m.reduce_mean(m.square(h), output_shape=rows)
    h = h * m.rsqrt(variance + 0.1) * (1.0 + v["scale"]) - v["bias"]
    return squared_error(m, h, d["y"])


def _convolution(m: Any, v: Tensors, d: Tensors) -> Any:
    dims = [mtf.Dimension("h", 4), mtf.Dimension("wide", 1), mtf.Dimension("channel", 1)]
    image = m.reshape(d["x"], mtf.Shape([*batch_of(d), *dims]))
    if m is mtf:
        made = mtf.Conv2dOperation(image, -v["w"], [1, 1, 1, 1], "VALID").outputs[0]
    else:
        made = tape.conv2d(image, -v["w"])
    seen = m.reduce_mean(m.tanh(made), output_shape=mtf.Shape([*batch_of(d), HIDDEN]))
    return squared_error(m, seen, d["y"])


def _recomputed(m: Any, v: Tensors, d: Tensors) -> Any:
    def layer(x: Any) -> Any:
        return m.tanh(predict(m, 1.0 - v["w"], {**d, "x": x}))

    h = m.recompute_grad(layer, [d["x"]], control_dependencies=False)
    return squared_error(m, h * v["s"], d["y"])


def _recomputed_of_a_variable(m: Any, v: Tensors, d: Tensors) -> Any:
    def layer(w: Any, x: Any) -> Any:
        return predict(m, m.tanh(w) * m.square(w), {**d, "x": x})

    h = m.recompute_grad(layer, [v["w"], d["x"]], control_dependencies=False)
    return squared_error(m, h, d["y"])


def _regularized(*factors: Callable[[Any, Any], Any]) -> Callable[[Any, Tensors, Tensors], Any]:
    """-w in the loss, and w in terms without the batch."""

    def loss(m: Any, v: Tensors, d: Tensors) -> Any:
        total = squared_error(m, predict(m, -v["w"], d), d["y"])
        for factor in factors:
            total += 0.01 * m.reduce_sum(factor(m, v["w"]))
        return total

    return loss


def _free_of_the_batch(m: Any, v: Tensors, d: Tensors) -> Any:
    return squared_error(m, predict(m, v["w"], d), d["y"]) + m.reduce_mean(m.square(v["b"]))


def _narrow(m: Any, v: Tensors, d: Tensors) -> Any:
    h = predict(m, v["w"] * 0.5, d)
    return squared_error(m, m.tanh(h) - v["b"], d["y"])


NARROW = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)
SCALE_AND_BIAS = {"w": W, "scale": [HIDDEN], "bias": [HIDDEN]}

LAYERS = {
    "tied embedding": Model({"table": [VOCAB, HIDDEN]}, _embedding),
    "layer norm": Model(SCALE_AND_BIAS, _layer_norm),
    "convolution": Model(
        {"w": [mtf.Dimension("fh", 2), ONE, mtf.Dimension("channel", 1), HIDDEN]}, _convolution
    ),
    "recomputed": Model(WITH_SCALAR, _recomputed),
    "recomputed of a variable": Model({"w": W}, _recomputed_of_a_variable),
    "regularizer": Model({"w": W}, _regularized(lambda m, w: m.square(w))),
    "regularizers": Model(
        {"w": W}, _regularized(lambda m, w: m.square(w), lambda m, w: w * m.sign(w))
    ),
    "free of the batch": Model(TWO, _free_of_the_batch),
    "bfloat16 activations": Model(_two(W, [HIDDEN]), _narrow, eps=BFLOAT16, dtype=NARROW),
    "microbatches": Model(
        WITH_SCALAR,
        lambda m, v, d: squared_error(m, predict(m, v["w"] * v["s"] - v["w"], d), d["y"]),
        microbatches=2,
    ),
    "microbatches with a regularizer": Model(
        {"w": W}, _regularized(lambda m, w: m.square(w)), microbatches=2
    ),
}

GROUPS = {
    "first": FIRST,
    "entrywise": ENTRYWISE,
    "shapes": SHAPES,
    "sums": SUMS,
    "layers": LAYERS,
}
ALL = {use: model for group in GROUPS.values() for use, model in group.items()}
