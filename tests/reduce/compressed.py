"""A model for compressed sums of gradients, and numpy's arithmetic of these sums.

All inputs are multiples of 1/32 below 1, so that gradients are exact in float32, in any order.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from tests import models
from tests.reduce import exact

BATCH, INPUTS, HIDDEN = 16, 24, 20
RATE = 0.5
batches = functools.partial(exact.batches, BATCH, INPUTS, HIDDEN)


def loss(mesh: mtf.Mesh, inputs: dict[str, tf.Tensor]) -> mtf.Tensor:
    """A loss that is linear in a matrix, a vector and a scalar."""
    batch, features = mtf.Dimension("batch", BATCH), mtf.Dimension("in", INPUTS)
    hidden = mtf.Dimension("hidden", HIDDEN)
    x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, features]))
    y = mtf.import_tf_tensor(mesh, inputs["y"], mtf.Shape([batch, hidden]))

    def variable(name: str, *shape: mtf.Dimension) -> mtf.Tensor:
        return models.variable(mesh, name, shape)

    terms = [
        mtf.einsum([x, variable("w", features, hidden), y], []),
        mtf.einsum([y, variable("b", hidden)], []),
        mtf.reduce_sum(y) * variable("gain"),
    ]
    return mtf.add_n(terms)


def gradients(feed: dict[str, np.ndarray], shards: int) -> dict[str, np.ndarray]:
    """The gradients of each shard by hand, `[shards, ...]`, of a batch of any size."""
    each = len(feed["x"]) // shards
    x, y = (feed[k].astype(float).reshape(shards, each, -1) for k in ("x", "y"))
    return {"w": np.einsum("sbi,sbh->sih", x, y), "b": y.sum(1), "gain": y.sum((1, 2))}


def encode(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """What is received of blocks `[..., numbers]`, float32, and what is not sent."""
    one, largest = np.float32(1), 2 ** (bits - 1) - 1
    top = np.abs(x).max(-1, keepdims=True)
    mantissa, exponent = np.frexp(top * np.float32(1 / largest))
    scale = np.ldexp(np.floor(mantissa * 256 + np.float32(0.5)), exponent - 8).astype("f")
    scale[top < 2.0**-100] = 0
    inverse = one / np.where(scale > 0, scale, one)
    whole = np.clip(np.rint(x * inverse), -largest, largest) * (scale > 0)
    received = (whole * scale).astype("f")
    return received, x - received


def quantized_sums(
    wanted: list[np.ndarray], bits: int, size: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sums of tensors by two exchanges, by hand.

    Args:
      wanted: float32, each `[shards, ...]`: what the shards add, with what they have not sent.
      bits: of a number.
      size: of a block.

    Returns:
      For each tensor the sum, and what the shards have not sent.
    """
    shards = len(wanted[0])
    flat = [x.reshape(shards, -1) for x in wanted]
    widths = [-(-x.shape[1] // size) * size for x in flat]
    rows = -(-sum(widths) // size // shards)
    padded = np.zeros([shards, shards * rows * size], "f")
    starts = np.cumsum([0, *widths])
    for start, x in zip(starts, flat):
        padded[:, start : start + x.shape[1]] = x
    received, left = encode(padded.reshape(shards, shards, rows, size), bits)
    total = np.zeros([shards, rows, size], "f")
    for shard in range(shards):
        total += received[shard]
    total, of_total = encode(total, bits)
    for shard in range(shards):
        left[shard, shard] += of_total[shard]
    total, left = total.reshape(-1), left.reshape(shards, -1)
    return [
        (
            total[a : a + y.shape[1]].reshape(x.shape[1:]),
            left[:, a : a + y.shape[1]].reshape(x.shape),
        )
        for a, x, y in zip(starts, wanted, flat)
    ]


def low_rank_sum(parts: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """PowerSGD by hand in float64, from `right`, `[columns, rank]`.

    Returns:
      The sum `[rows, columns]`, what each shard has not sent, and the new right factor.
    """
    q, _ = np.linalg.qr(right)
    p, _ = np.linalg.qr(sum(part @ q for part in parts))
    own = np.stack([part.T @ p for part in parts])
    return p @ own.sum(0).T, parts - np.einsum("ir,scr->sic", p, own), own.sum(0)


def parts_of(array: Any, slices: int) -> list[np.ndarray]:
    """Slices of the last dimension, as the layout splits "hidden"."""
    return np.split(np.asarray(array), slices, -1)
