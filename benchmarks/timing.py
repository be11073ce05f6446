"""Times programs in turns, so that what slows the machine down slows all of them down."""

from __future__ import annotations

import gc
import time
from typing import Any, Callable, Collection, Iterable, NamedTuple, Sequence

import numpy as np
from tqdm import tqdm


class Spread(NamedTuple):
    """A median with its quartiles."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of values."""
    low, median, high = np.percentile(list(values), [25, 50, 75])
    return Spread(float(median), float(low), float(high))


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> Spread:
    """Median and quartiles of the ratios of each round: time of `name` over time of `base`."""
    return spread([a / b for a, b in zip(seconds[name], seconds[base])])


def progress(items: Collection[Any], description: str) -> Iterable[Any]:
    """Goes through items and shows how far it is, on a terminal only."""
    return tqdm(items, desc=description, unit="round", leave=False, disable=None)


def interleave(
    programs: dict[str, Callable[[], Any]],
    rounds: int,
    steps: int,
    description: str,
    settle: bool = False,
) -> dict[str, list[float]]:
    """Runs programs in turns.

    Each round runs every program `steps` times in a row. Odd rounds go through the programs in
    reverse, so that none always follows the same one.

    Args:
      programs: functions that make one step each.
      rounds: how often.
      steps: steps of a program in a round.
      description: for the progress bar.
      settle: make one step more, untimed, before those of a round: steps of a program that fills
        caches and memory otherwise cost the next program time.

    Returns:
      For each program the seconds per step of each round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for number in progress(range(rounds), description):
        order = list(programs) if number % 2 == 0 else list(reversed(list(programs)))
        gc.collect()
        for name in order:
            step = programs[name]
            if settle:
                step()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            seconds[name].append((time.perf_counter() - start) / steps)
    return seconds
