"""Outer steps in numpy float64, on the model of `tests.models`."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Sequence

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
    fragments: Sequence[Mapping[str, Any]],
    change: Callable[[Values], Values] = lambda grads: grads,
    mean: Callable[[str, Any, np.ndarray], Any] = lambda name, mask, parts: parts.mean(0),
) -> Trained:
    """Trains islands on their parts of the batches.

    Each fragment has a mask of its numbers, by variable. `change` is what is done to the gradients
    of each island, and `mean` is how the islands' differences of a variable are reduced.
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
        for number, masks in enumerate(fragments, 1):
            if step % inner_steps != number * inner_steps // len(fragments) % inner_steps:
                continue
            for k, mask in masks.items():
                gradient = mean(k, mask, np.stack([outer[k] - island[k] for island in islands]))
                after = momentum * velocity[k] + gradient
                move = gradient + momentum * after if nesterov else after
                velocity[k] = np.where(mask, after, velocity[k])
                outer[k] = np.where(mask, outer[k] - rate * move, outer[k])
                for island in islands:
                    island[k] = np.where(mask, outer[k], island[k])
    return Trained(outer, islands)


ALL: list[dict[str, Any]] = [dict.fromkeys(models.mlp_values(), True)]


def cut(columns: int, *ends: int) -> list[dict[str, Any]]:
    """Fragments that cut the model's "w1"; the last one has all of the other variables.

    Args:
      columns: of a core's slice of "w1".
      *ends: where each fragment's numbers end in the slice.
    """
    numbers = np.arange(models.INPUTS * columns).reshape(models.INPUTS, columns)
    of_slices = np.tile(numbers, models.HIDDEN // columns)
    made: list[dict[str, Any]] = [
        {"w1": (start <= of_slices) & (of_slices < end)} for start, end in zip((0, *ends), ends)
    ]
    made[-1].update(dict.fromkeys(set(models.mlp_values()) - {"w1"}, True))
    return made
