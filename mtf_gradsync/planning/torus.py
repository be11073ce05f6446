"""The links of a group of cores on a TPU slice, by the places of its cores."""

from __future__ import annotations

from typing import NamedTuple, Sequence

from mtf_gradsync.planning.chips import HOP_SECONDS, Chip
from mtf_gradsync.planning.rings import bytes_of_chip, bytes_sent, hops

Place = Sequence[int]


class Links(NamedTuple):
    """The links that one group of cores uses."""

    chips: int  # that its cores are on; cores of one chip need no link
    cores_per_chip: float  # of the group, on average
    # Of all links that a chip of the group sends on, divided among the groups that use them.
    bytes_per_second: float
    is_ring: bool  # whether all directions that the group extends in close to rings


class Torus:
    """A TPU slice: chips in a grid, with links between neighbours."""

    def __init__(self, chip: Chip, places: Sequence[Place]):
        """Takes the places of the cores, in the program's order.

        A place is the coordinates of the core's chip and then its number on the chip.
        """
        self._chip = chip
        self._places = [tuple(place) for place in places]
        self._size = tuple(max(column) + 1 for column in zip(*(p[:-1] for p in self._places)))

    @property
    def cores_per_chip(self) -> int:
        """The number of cores on a chip, as the compiler counts them."""
        return 1 + max(place[-1] for place in self._places)

    def links(self, group: Sequence[int]) -> Links:
        """The links of the smallest box of chips around a group of cores.

        Where other groups have cores in that box, all of these share the links.
        """
        cores = [self._places[core] for core in group]
        chips = {place[:-1] for place in cores}
        if len(chips) < 2:
            return Links(len(chips), len(cores), float("inf"), True)
        columns = list(zip(*chips))
        low, high = [min(c) for c in columns], [max(c) for c in columns]
        extents = [b - a + 1 for a, b in zip(low, high)]
        closed = [
            extent == size and self._chip.closes(extent, self._size)
            for extent, size in zip(extents, self._size)
            if extent > 1
        ]
        rate = sum(2 if ring else 1 for ring in closed) * self._chip.link_bytes_per_second
        in_box = sum(
            all(a <= x <= b for a, x, b in zip(low, place, high)) for place in self._places
        )
        per_chip = len(cores) / len(chips)
        return Links(len(chips), per_chip, rate * len(cores) / in_box, all(closed))

    def seconds(self, operation: str, groups: Sequence[Sequence[int]], size: float) -> float:
        """Seconds that a collective takes over the links, with no other traffic on them.

        That is the time of the slowest of the groups (for "collective-permute" pairs), which run at
        the same time. Each core puts in `size` bytes; the time to read and write memory is not
        counted.
        """
        slowest = 0.0
        for links in {self.links(group) for group in groups}:
            wait = hops(operation, links.chips) * HOP_SECONDS / (2 if links.is_ring else 1)
            put_in = bytes_of_chip(operation, links.cores_per_chip, size)
            sent = bytes_sent(operation, links.chips, put_in)
            slowest = max(slowest, wait, sent / links.bytes_per_second)
        return slowest
