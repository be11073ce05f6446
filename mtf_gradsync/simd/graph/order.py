"""Sorts items so that each comes after those that it needs."""

from __future__ import annotations

import heapq
from typing import Collection, Hashable, Mapping, TypeVar

import graphlib

_Item = TypeVar("_Item", bound=Hashable)


class CycleError(ValueError):
    """Items in a cycle: each is needed by the next, the last by the first."""

    def __init__(self, cycle: list[Hashable]):
        self.cycle = cycle
        super().__init__(f"These need each other: {cycle}.")


def in_order(needs: Mapping[_Item, Collection[_Item]]) -> list[_Item]:
    """Returns items sorted so that each comes after those it needs, otherwise in the given order.

    What an item needs is in the mapping, too. Raises `CycleError` if items need each other.
    """
    items = list(needs)
    place = {item: i for i, item in enumerate(items)}
    sorter = graphlib.TopologicalSorter(needs)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        raise CycleError(error.args[1][:-1]) from None
    ordered: list[_Item] = []
    ready: list[int] = []
    while sorter.is_active():
        for item in sorter.get_ready():
            heapq.heappush(ready, place[item])
        ordered.append(items[heapq.heappop(ready)])
        sorter.done(ordered[-1])
    return ordered
