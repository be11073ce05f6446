"""Small training steps in jax, batch and model parallel, to measure a machine with."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

Mesh = tuple[int, int]
_HEADS = 4
_FEW_MESHES = 3


class Size(NamedTuple):
    """How large a step is: a transformer's blocks, on sequences of vectors.

    Attributes:
      layers: blocks of attention and a dense part.
      width: of the vectors.
      batch: sequences of all cores together.
      length: vectors in a sequence.
    """

    layers: int
    width: int
    batch: int
    length: int


# Larger products and more bytes; more and smaller operations.
_SIZES = (Size(1, 192, 16, 64), Size(2, 128, 16, 32), Size(3, 64, 16, 64))


def choose(count: int) -> list[tuple[Mesh, Size]]:
    """Which steps to run on up to a number of devices.

    Args:
      count: how many devices there are.

    Returns:
      Meshes of batch and model with sizes: of each number of cores that divides `count`, along the
      batch, along the model up to 4 cores, and both. One and two cores appear with all sizes, as
      idle processors count most there, and so does every mesh where there are few.
    """
    meshes = [
        (cores // model, model)
        for cores in range(1, count + 1)
        if count % cores == 0
        for model in (1, 2, _HEADS)
        if cores % model == 0
    ]
    chosen = []
    for number, mesh in enumerate(meshes):
        takes_all = mesh[0] * mesh[1] <= 2 or len(meshes) <= _FEW_MESHES
        sizes = _SIZES if takes_all else (_SIZES[number % len(_SIZES)],)
        chosen += [(mesh, size) for size in sizes]
    return chosen


def compile_step(mesh: Mesh, size: Size, devices: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Compiles a step.

    Args:
      mesh: cores along the batch, and along the model.
      size: how large the step is.
      devices: as many jax devices as the mesh has cores.

    Returns:
      jax's compiled step, and its arguments.
    """
    import jax

    values = _values(mesh, size)
    spread = jax.pmap(lambda x: x, devices=devices)
    arguments = [
        jax.tree_util.tree_map(lambda x: spread(np.stack([x] * len(devices))), value)
        for value in values
    ]
    step = jax.pmap(_step(mesh, size), axis_name="core", devices=devices)
    return step.lower(*arguments).compile(), arguments


def _values(mesh: Mesh, size: Size) -> list[Any]:
    """One core's weights, their statistics, and its input."""
    width = size.width
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(size.layers):
        heads = (width, _HEADS // mesh[1], width // _HEADS)
        for name in ("query", "key", "value", "back"):
            shapes[f"{name}{layer}"] = heads
        shapes[f"in{layer}"] = shapes[f"out{layer}"] = (width, 4 * width // mesh[1])
        shapes[f"scale{layer}"] = (width,)
    rng = np.random.RandomState(0)
    weights = {n: (rng.randn(*s) / np.sqrt(width)).astype("f") for n, s in shapes.items()}
    squares = {n: np.ones(s, "f") for n, s in shapes.items()}
    rows = max(1, size.batch // mesh[0])
    return [weights, squares, rng.randn(rows, size.length, width).astype("f")]


def _step(mesh: Mesh, size: Size) -> Callable[..., Any]:
    """Forward, backward, a packed sum of gradients over the batch, and an update of each weight."""
    import jax
    import jax.numpy as jnp

    ids = np.arange(mesh[0] * mesh[1]).reshape(mesh)

    def summed(x: Any, groups: np.ndarray) -> Any:
        if groups.shape[1] == 1:
            return x
        return jax.lax.psum(x, "core", axis_index_groups=groups.tolist())

    def normed(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (1 + scale)

    def loss(w: Any, x: Any) -> Any:
        for layer in range(size.layers):
            y = normed(x, w[f"scale{layer}"])
            q, k, v = (
                jnp.einsum("bld,dhk->blhk", y, w[f"{name}{layer}"])
                for name in ("query", "key", "value")
            )
            shares = jax.nn.softmax(jnp.einsum("blhk,bmhk->bhlm", q, k))
            heads = jnp.einsum("bhlm,bmhk->blhk", shares, v)
            x = x + summed(jnp.einsum("blhk,dhk->bld", heads, w[f"back{layer}"]), ids)
            hidden = jax.nn.relu(normed(x, w[f"scale{layer}"]) @ w[f"in{layer}"])
            x = x + summed(hidden @ w[f"out{layer}"].T, ids)
        return jnp.mean(x * x)

    def step(w: Any, squares: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(w, x)
        names = list(grads)
        packed = summed(jnp.concatenate([grads[n].ravel() for n in names]), ids.T)
        parts = jnp.split(packed, np.cumsum([grads[n].size for n in names])[:-1])
        new = {}
        for name, part in zip(names, parts):
            g = part.reshape(w[name].shape)
            squares[name] = 0.9 * squares[name] + 0.1 * g * g
            change = g * jax.lax.rsqrt(squares[name] + 1e-6)
            # One small sum a weight, as of optimizers that clip each update.
            norm = jnp.sqrt(summed(jnp.mean(change * change), ids))
            new[name] = w[name] - 1e-3 * change / jnp.maximum(1.0, norm)
        return value, new, squares

    return step
