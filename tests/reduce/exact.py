"""Inputs whose products and sums are exact in float32, in any order."""

from __future__ import annotations

import numpy as np


def batches(
    batch: int, inputs: int, hidden: int, steps: int, seed: int = 0
) -> list[dict[str, np.ndarray]]:
    """Multiples of 1/32 up to 1 for some steps: "x" `[batch, inputs]`, "y" `[batch, hidden]`."""
    rng = np.random.RandomState(seed)
    shapes = {"x": [batch, inputs], "y": [batch, hidden]}
    return [
        {k: (rng.randint(-32, 33, s) / 32).astype("f") for k, s in shapes.items()}
        for _ in range(steps)
    ]
