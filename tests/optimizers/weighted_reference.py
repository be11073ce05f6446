"""What stacks of wrappers make of gradients with weights, in numpy float64.

A step gives each shard's own mean gradient with its weight; parts that are joined become the
weighted mean of all of them.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import numpy as np

Part = tuple[np.ndarray, float]
Parts = list[Part]


def joined(parts: Parts) -> tuple[Any, float]:
    """The weighted mean of parts and their weight; None for parts without any."""
    total = sum(weight for _, weight in parts)
    return (sum(g * n for g, n in parts if n) / total if total else None), total


class Stack:
    """Wrappers from the outside in, around an update from values and a gradient to new values."""

    def __init__(
        self,
        names: Sequence[str],
        update: Callable[[np.ndarray, np.ndarray], np.ndarray],
        start: np.ndarray,
        passes: int = 2,
        average: bool = False,
        norm: float = 1.0,
        to_aggregate: int = 2,
    ):
        self.names, self.update, self.passes, self.average = names, update, passes, average
        self.norm, self.to_aggregate = norm, to_aggregate
        self.kept: Parts = []
        self.contributed: Parts = []
        self.count = self.without_data = self.updates = 0
        self.outer, self.velocity = start.astype("d"), np.zeros(start.shape)

    def __call__(self, w: np.ndarray, parts: Parts, names: Any = None) -> tuple[np.ndarray, float]:
        """Returns the values after a step, and the weight of its update, 0 for none."""
        names = self.names if names is None else names
        if not names:
            grad, total = joined(parts)
            self.without_data += total == 0
            return (self.update(w, grad), total) if total else (w, 0)
        name, inside = names[0], names[1:]
        if name.startswith("Outer"):  # one island
            w, total = self(w, parts, inside)
            self.updates += total > 0
            if total and self.updates % 2 == 0:
                self.velocity = 0.5 * self.velocity + self.outer - w
                w = self.outer = self.outer - 0.7 * (self.outer - w + 0.5 * self.velocity)
            return w, total
        if name.startswith("GradientAcc"):
            self.kept += parts
            self.count += 1
            if self.count < self.passes:
                return w, 0
            factor = 1 if self.average else self.count
            parts, self.kept, self.count = self.kept, [], 0
            parts = [(g * factor if n else g, n) for g, n in parts]
        elif name.startswith("Clip"):
            grad, total = joined(parts)
            if total:
                parts = [(grad * min(1.0, self.norm / np.linalg.norm(grad)), total)]
        elif name.startswith("Sync"):
            self.contributed += [part for part in parts if part[1]]
            if len(self.contributed) < self.to_aggregate:
                return w, 0
            parts, self.contributed = self.contributed, []
        return self(w, parts, inside)


class Islands:
    """Stacks of islands, with an outer step every two updates, weighted by what islands had."""

    def __init__(self, make: Callable[[], Stack], number: int, start: np.ndarray):
        self.stacks = [make() for _ in range(number)]
        self.outer, self.velocity, self.updates = start.astype("d"), np.zeros(start.shape), 0
        self.own, self.weights = [self.outer] * number, np.zeros(number)

    def __call__(self, gradients: Callable[[np.ndarray], Parts]) -> None:
        """Takes a step by the gradients of all shards at some values."""
        number = len(self.stacks)
        moved, names = [], [name[:11] for name in self.stacks[0].names]
        for island, (stack, w) in enumerate(zip(self.stacks, self.own)):
            parts = gradients(w)
            size = len(parts) // number
            moved.append(stack(w, parts[size * island : size * (island + 1)]))
        for island, (w, total) in enumerate(moved):
            # An island without data, where another has some, takes a step with a gradient of zeros.
            if total == 0 and any(n for _, n in moved) and "GradientAcc" not in names:
                moved[island] = self.stacks[island].update(w, np.zeros(w.shape)), 0
        self.own = [w for w, _ in moved]
        self.weights = self.weights + [total for _, total in moved]
        is_updated = any(total for _, total in moved)
        self.updates += is_updated
        if is_updated and self.updates % 2 == 0:
            away = sum(n * (self.outer - w) for n, w in zip(self.weights, self.own))
            difference = away / self.weights.sum()
            self.velocity = 0.5 * self.velocity + difference
            self.outer = self.outer - 0.7 * (difference + 0.5 * self.velocity)
            self.own, self.weights = [self.outer] * number, np.zeros(number)
