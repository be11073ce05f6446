"""The links of a group of cores on a TPU slice, by the places of its cores."""

from __future__ import annotations

from typing import NamedTuple, Sequence

from mtf_gradsync.planning.chips import HOP_SECONDS, Chip
from mtf_gradsync.planning.rings import bytes_sent, hops

Place = Sequence[int]


class Links(NamedTuple):
    """The links that one group of cores uses.

    Attributes:
      chips: the number of chips that its cores are on. Cores of one chip need no link.
      bytes_per_second: rate of all links that a chip of the group sends on, divided among the
        groups that use the same links.
      is_ring: whether all directions that the group extends in close to rings.
    """

    chips: int
    bytes_per_second: float
    is_ring: bool


class Torus:
    """A TPU slice: chips in a grid, with links between neighbours."""

    def __init__(self, chip: Chip, places: Sequence[Place]):
        """Describes a slice.

        Args:
          chip: the kind of chip.
          places: for each core, in the order of the program's cores, the coordinates of its chip
            and then its number on the chip.
        """
        self._chip = chip
        self._places = [tuple(place) for place in places]
        self._size = tuple(max(column) + 1 for column in zip(*(p[:-1] for p in self._places)))

    @property
    def cores_per_chip(self) -> int:
        """The number of cores on a chip, as the compiler counts them."""
        return 1 + max(place[-1] for place in self._places)

    def links(self, group: Sequence[int]) -> Links:
        """The links of a group of cores.

        These are the links of the smallest box of chips around it. Where other groups have cores
        in that box, all of these share the links.

        Args:
          group: numbers of cores.

        Returns:
          The links.
        """
        cores = [self._places[core] for core in group]
        chips = {place[:-1] for place in cores}
        if len(chips) < 2:
            return Links(len(chips), float("inf"), True)
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
        return Links(len(chips), rate * len(cores) / in_box, all(closed))

    def seconds(self, operation: str, groups: Sequence[Sequence[int]], size: float) -> float:
        """Seconds that a collective takes over the links, with no other traffic on them.

        Args:
          operation: HLO's name of it, as in "all-reduce".
          groups: the cores that exchange data, group by group, all at the same time; for
            "collective-permute" pairs.
          size: bytes that each core puts in.

        Returns:
          Seconds of the slowest group, without the time to read and write memory.
        """
        slowest = 0.0
        for links in {self.links(group) for group in groups}:
            wait = hops(operation, links.chips) * HOP_SECONDS / (2 if links.is_ring else 1)
            sent = bytes_sent(operation, links.chips, size)
            slowest = max(slowest, wait, sent / links.bytes_per_second)
        return slowest
