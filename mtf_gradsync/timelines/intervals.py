"""Arithmetic of intervals of time: what is covered, by what alone, and for how long."""

from __future__ import annotations

from typing import Iterable, Sequence, Tuple

# Begin and end, in nanoseconds; the end is not part of it.
Interval = Tuple[int, int]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that intervals in any order cover, as intervals in order that do not touch."""
    found: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[0] < i[1]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(intervals: Sequence[Interval]) -> int:
    """The sum of how long intervals are, in nanoseconds."""
    return sum(end - begin for begin, end in intervals)


def minus(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The time that merged intervals cover and others, merged too, do not."""
    found = []
    position = 0
    for begin, end in intervals:
        while position < len(others) and others[position][1] <= begin:
            position += 1
        at, next_one = begin, position
        while next_one < len(others) and others[next_one][0] < end:
            if at < others[next_one][0]:
                found.append((at, others[next_one][0]))
            at = max(at, others[next_one][1])
            next_one += 1
        if at < end:
            found.append((at, end))
    return found


def shared(intervals: Sequence[Interval], others: Sequence[Interval]) -> int:
    """How long merged intervals and others, merged too, are at the same time, in nanoseconds."""
    return length(intervals) - length(minus(intervals, others))
