"""Outer steps in numpy float64, on the model of `tests.models`."""

from __future__ import annotations

from typing import Callable, NamedTuple, Sequence

import numpy as np

from tests import models, reference
from tests.reference import Values


class Trained(NamedTuple):
    """What training ends with: the outer values, and those of each island."""

    outer: Values
    islands: list[Values]


def train(
    optimizer: str,
    feeds: Sequence[dict[str, np.ndarray]],
    num_islands: int,
    inner_steps: int,
    rate: float,
    momentum: float,
    nesterov: bool,
    turns: Sequence[Sequence[str]],
    change: Callable[[Values], Values] = lambda grads: grads,
) -> Trained:
    """Trains islands on their parts of the batches; variables of `turns[i]` move together.

    `change` is what is done to the gradients of each island.
    """
    outer = {k: np.asarray(v, np.float64) for k, v in models.mlp_values().items()}
    islands = [dict(outer) for _ in range(num_islands)]
    inner = [reference.OPTIMIZERS[optimizer]() for _ in range(num_islands)]
    velocity = {k: np.zeros_like(v) for k, v in outer.items()}
    for step, feed in enumerate(feeds, 1):
        parts = zip(*(np.split(feed[k].astype(np.float64), num_islands) for k in ("x", "y")))
        for number, (x, y) in enumerate(parts):
            grads = change(reference.mlp_grads(islands[number], x, y))
            islands[number] = inner[number](islands[number], grads)
        for turn, names in enumerate(turns, 1):
            if step % inner_steps != turn * inner_steps // len(turns) % inner_steps:
                continue
            for k in names:
                gradient = outer[k] - np.mean([island[k] for island in islands], axis=0)
                velocity[k] = momentum * velocity[k] + gradient
                move = gradient + momentum * velocity[k] if nesterov else velocity[k]
                outer[k] = outer[k] - rate * move
                for island in islands:
                    island[k] = outer[k]
    return Trained(outer, islands)
