"""What a small program is, and the parts that the models of several are made of."""

from __future__ import annotations

import contextlib
import zlib
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from tests import reference

ROWS, STEPS = 4, 4
Feed = dict[str, np.ndarray]
Values = dict[str, np.ndarray]


def at_once(optimizer, grads, variables):
    """As most programs apply gradients."""
    return optimizer.apply_grads(grads, variables)


class Style(NamedTuple):
    """A program.

    Attributes:
      loss: makes the loss of each example from the mesh and the inputs, of which each begins with
        the examples.
      feed: makes the inputs of a step from random numbers.
      optimizer: makes the bare optimizer from the mesh and the inputs.
      moves: makes the same in numpy: a function of values, gradients and inputs to new values.
      layout: of the mesh.
      shape: of the mesh; the shards lie along its first axis.
      shards: how many there are.
      batch_dims: tensor dimensions that the inputs are split along; the first is the examples.
      apply: applies gradients to variables by an optimizer.
      gradients: as `mtf.gradients`.
      clip: the norm to which `apply` clips all gradients, if it does.
      mixes: whether each shard's gradients depend on the examples of all.
      exchanged: the relative error of what its model exchanges on SIMD meshes.
    """

    loss: Callable[[mtf.Mesh, dict[str, tf.Tensor]], mtf.Tensor]
    feed: Callable[[np.random.RandomState], Feed]
    optimizer: Callable[[mtf.Mesh, dict[str, tf.Tensor]], Any]
    moves: Callable[[], Callable[[Values, Values, Feed], Values]]
    layout: str
    shape: str = "rows:2;cols:2"
    shards: int = 2
    batch_dims: tuple[str, ...] = ("batch",)
    apply: Callable[..., list[mtf.Operation]] = at_once
    gradients: Callable[..., list[mtf.Tensor]] = mtf.gradients
    clip: float | None = None
    mixes: bool = False
    exchanged: float = 0.0


class Made(NamedTuple):
    """A variable of a reference.

    Attributes:
      given: the placeholder of its value.
      value: that in the model.
      first: what it begins with.
    """

    given: tf.Tensor
    value: mtf.Tensor
    first: np.ndarray


# The variables of the reference that is built, if one is.
_made: dict[str, Made] | None = None


@contextlib.contextmanager
def made_in_float64() -> Iterator[dict[str, Made]]:
    """Inside, `variable` and `imported` make placeholders of float64."""
    global _made
    _made = {}
    try:
        yield _made
    finally:
        _made = None


def variable(mesh, name, *dims):
    """A variable whose first value is known by its name."""
    rng, shape = np.random.RandomState(zlib.crc32(name.encode())), mtf.Shape(list(dims))
    value = rng.uniform(-0.5, 0.5, shape.to_integer_list)
    if _made is None:
        return mtf.get_variable(mesh, name, shape, initializer=tf.constant_initializer(value))
    given = tf.placeholder(tf.float64, value.shape)
    tensor = mtf.import_tf_tensor(mesh, given, shape)
    _made[name] = Made(given, tensor, value.astype(np.float32).astype(np.float64))
    return tensor


def imported(mesh, tensor, *dims, examples="batch"):
    """An input; its first dimension is that of the examples."""
    rows = mtf.Dimension(examples, tensor.shape.as_list()[0])
    if _made is not None and tensor.dtype.is_floating:
        tensor = tf.cast(tensor, tf.float64)
    return mtf.import_tf_tensor(mesh, tensor, mtf.Shape([rows, *dims]))


def normed(x, dim, name):
    """A layer norm."""
    x -= mtf.reduce_mean(x, reduced_dim=dim)
    x *= mtf.rsqrt(mtf.reduce_mean(mtf.square(x), reduced_dim=dim) + 1e-3)
    return x * (1.0 + variable(x.mesh, f"{name}/scale", dim))


def mixed(query, memory, d, heads, size, name, mask=None):
    """Attention to another sequence, whose length is called "memory", with two matrices."""
    mesh, per_head = query.mesh, [heads, size]
    weights = [variable(mesh, f"{name}/{n}", d, *per_head) for n in ("q", "kv")]
    q, v = (mtf.einsum(xw, reduced_dims=[d]) for xw in zip((query, memory), weights))
    scores = mtf.einsum([q, v], reduced_dims=[size])
    scores = scores if mask is None else scores + mask
    length = next(x for x in scores.shape.dims if x.name == "memory")
    out = mtf.einsum([mtf.softmax(scores, length), v], reduced_dims=[length])
    return mtf.einsum([out, weights[1]], reduced_dims=per_head)


def cross_entropy(logits, right, dim):
    """Of the classes of `dim`, by their numbers."""
    right = mtf.one_hot(right, dim, dtype=logits.dtype)
    return mtf.layers.softmax_cross_entropy_with_logits(logits, right, dim)


def adam(rate, decay=0.0, betas=(0.9, 0.999), epsilon=1e-3, spared=()):
    """Makes Mesh-TF's, in numpy."""

    def make():
        update = reference.Adam(rate, decay, betas, epsilon, spared)
        return lambda values, grads, feed: update(values, grads)

    return make


def descent(rate):
    """Makes plain gradient descent, in numpy."""
    return lambda: lambda values, grads, feed: {k: values[k] - rate * g for k, g in grads.items()}
