"""Extracts series from the lines of a metrics file."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np

# More points than these cannot be distinguished in a plot, and make a large page.
_MOST_POINTS = 400


class Series(NamedTuple):
    """Measurements at steps ``[points]``: values ``[points]``, or ``[points, shards]``.

    A point is the mean of `steps_per_point` logged steps.
    """

    steps: np.ndarray
    values: np.ndarray
    steps_per_point: int = 1

    @property
    def last(self) -> Any:
        """The newest value, or the newest for each shard."""
        return self.values[-1]


def series_of(rows: Sequence[dict[str, Any]], name: str) -> Series | None:
    """Returns the values that lines of a metrics file have under a name; None without a finite one.

    Where the number of shards has changed, lines with the newest number are used.
    """
    found = [(row["step"], np.asarray(row[name], float)) for row in rows if name in row]
    found = [(step, value) for step, value in found if np.all(np.isfinite(value))]
    if not found:
        return None
    shape = found[-1][1].shape
    found = [(step, value) for step, value in found if value.shape == shape]
    return Series(np.array([s for s, _ in found]), np.stack([v for _, v in found]))


def thinned(series: Series, is_count: bool = False) -> Series:
    """Returns a series with fewer points: means of neighbours, or every n-th of a count."""
    size = -(-len(series.steps) // _MOST_POINTS)
    if size == 1:
        return series
    ends = np.append(np.arange(size, len(series.steps), size), len(series.steps))
    steps = series.steps[ends - 1]
    if is_count:
        return Series(steps, series.values[ends - 1], 1)
    starts = np.append(0, ends[:-1])
    values = np.add.reduceat(series.values, starts) / (ends - starts).reshape(
        [-1] + [1] * (series.values.ndim - 1)
    )
    return Series(steps, values, size)
