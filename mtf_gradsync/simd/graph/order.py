"""Orders in which everything comes after what it needs."""

from __future__ import annotations

import heapq
from typing import Collection, Hashable, Mapping, TypeVar

import graphlib

_Item = TypeVar("_Item", bound=Hashable)


class CycleError(ValueError):
    """Items need each other.

    Attributes:
      cycle: the items, each needed by the next, the last by the first.
    """

    def __init__(self, cycle: list[Hashable]):
        self.cycle = cycle
        super().__init__(f"These need each other: {cycle}.")


def in_order(needs: Mapping[_Item, Collection[_Item]]) -> list[_Item]:
    """Sorts items so that each comes after what it needs, and otherwise stays where it is.

    Args:
      needs: each item -> the items of the same mapping that have to come first.

    Returns:
      The items. Of those that could come next, it is always the first in the mapping's order.

    Raises:
      CycleError: when items need each other.
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
