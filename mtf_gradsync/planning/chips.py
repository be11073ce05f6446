"""The published rates of TPU chips and of the links between them, each with its source."""

from __future__ import annotations

from typing import NamedTuple

_CLOUD = "https://cloud.google.com/tpu/docs"
_V2_V3 = "https://doi.org/10.1145/3360307"
_V4 = "https://arxiv.org/abs/2304.01433"
_BOOK = "https://jax-ml.github.io/scaling-book"
_GIB = 2**30

#: Seconds that one hop from chip to chip takes, however little is sent; source:
#: https://jax-ml.github.io/scaling-book/sharding ("about 1 us").
HOP_SECONDS = 1e-6


class Chip(NamedTuple):
    """The published figures of one TPU chip. Rates are per chip and per second.

    Attributes:
      name: as topology names spell it, as in "v5e" of "v5e:4x4".
      peak_flops: floating-point operations in bfloat16.
      hbm_bytes: size of the memory.
      hbm_bytes_per_second: bytes read from the memory and written to it.
      links: links to neighbouring chips.
      link_bytes_per_second: bytes over one link in one direction.
      full_ring: chips along a direction of a whole pod, where the links close to a ring; 0 where
        rings close by optical switches, in slices whose directions are all multiples of 4.
      sources: addresses of the sources: of the chip's figures, of its links'.
    """

    name: str
    peak_flops: float
    hbm_bytes: float
    hbm_bytes_per_second: float
    links: int
    link_bytes_per_second: float
    full_ring: int
    sources: tuple[str, ...]

    def closes(self, direction: int, directions: tuple[int, ...]) -> bool:
        """Whether the links along a direction of a slice close to a ring.

        Args:
          direction: the number of chips along the direction.
          directions: the numbers of chips along all directions of the slice.

        Returns:
          Whether they close; source: https://jax-ml.github.io/scaling-book/tpus (networking).
        """
        if self.full_ring:
            return direction >= self.full_ring
        return direction > 1 and all(size % 4 == 0 for size in directions if size > 1)


#: Cloud's tables give the links of v5e, v5p, v6e and tpu7x as one figure for all links of a chip in
#: both directions (400, 1200, 800 and 1200 GB/s): a link in one direction has that by twice the
#: number of links. The papers of v2, v3 and v4 give links (496 and 656 Gbit/s, 50 GB/s). Cloud's
#: pages of v3 and v4 have the all-reduce of a pod, 340 TB/s of 1,024 chips and 1.1 PB/s of 4,096:
#: 83 and 45 GB/s over each link.
CHIPS = (
    Chip("v2", 46e12, 16 * _GIB, 700e9, 4, 62e9, 16, (_V2_V3, _V2_V3)),
    Chip("v3", 123e12, 32 * _GIB, 900e9, 4, 82e9, 32, (f"{_CLOUD}/v3", _V2_V3)),
    Chip("v4", 275e12, 32 * _GIB, 1200e9, 6, 50e9, 0, (f"{_CLOUD}/v4", _V4)),
    Chip("v5e", 197e12, 16e9, 819e9, 4, 50e9, 16, (f"{_CLOUD}/v5e", f"{_BOOK}/tpus")),
    Chip("v5p", 459e12, 95 * _GIB, 2765e9, 6, 100e9, 0, (f"{_CLOUD}/v5p", f"{_BOOK}/tpus")),
    Chip("v6e", 918e12, 32e9, 1638e9, 4, 100e9, 16, (f"{_CLOUD}/v6e", f"{_BOOK}/tpus")),
    Chip("tpu7x", 2307e12, 192 * _GIB, 7380e9, 6, 100e9, 0, (f"{_CLOUD}/tpu7x", f"{_CLOUD}/tpu7x")),
)


def chip_of(topology: str) -> Chip:
    """The figures of the chips of a topology such as "v5e:4x4"; ValueError when there are none."""
    name = topology.partition(":")[0]
    for chip in CHIPS:
        if chip.name == name:
            return chip
    raise ValueError(
        f"There are no figures of {name!r}; known are {', '.join(c.name for c in CHIPS)}"
    )
