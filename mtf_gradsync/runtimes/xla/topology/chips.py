"""TPU chips: published figures, and names of slices."""

from __future__ import annotations

import re
from typing import NamedTuple

_CLOUD = "https://cloud.google.com/tpu/docs"
_V2_V3 = "https://doi.org/10.1145/3360307"
_V4 = "https://arxiv.org/abs/2304.01433"
_BOOK = "https://jax-ml.github.io/scaling-book"
_GIB = 2**30


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


class Rates(NamedTuple):
    """What one core can do in a second."""

    flops: float  # floating-point operations of products, in bfloat16
    bytes: float  # that it reads from its memory and writes to it


class Generation(NamedTuple):
    """One TPU generation, as its programs see it.

    Attributes:
      name: as topology names spell it, as in "v3" of "v3:2x2".
      memory_per_core: bytes of HBM that a program may use on one core.
      example: a topology of this generation with 8 cores.
      cores_per_chip: the number of cores on a chip.
    """

    name: str
    memory_per_core: int
    example: str
    cores_per_chip: int = 1


#: The memory is what libtpu 0.0.42.1 calls "available HBM" when it refuses a program that needs
#: more. It is a little less than what Google Cloud's tables give for a chip (16, 32, 32, 16, 95, 32
#: and 192 GB), as the runtime keeps some for itself. A core is what a program counts as one: half a
#: chip on v2, v3 and tpu7x, and the whole chip on the others. A v4 chip's two TensorCores are one
#: core as users run them ("megacore"); see `Slice`.
GENERATIONS = (
    Generation("v2", int(7.48 * _GIB), "v2:2x2", 2),
    Generation("v3", int(15.48 * _GIB), "v3:2x2", 2),
    Generation("v4", int(30.75 * _GIB), "v4:2x2x2"),
    Generation("v5e", int(15.75 * _GIB), "v5e:2x4"),
    Generation("v5p", int(95.74 * _GIB), "v5p:2x2x2"),
    Generation("v6e", int(31.25 * _GIB), "v6e:2x4"),
    Generation("tpu7x", int(94.75 * _GIB), "tpu7x:2x2x1", 2),
)
_TWO_CORES = "two_cores"
_V4_HALF = Generation("v4", int(15.25 * _GIB), f"v4:2x2x1/{_TWO_CORES}", 2)

# Names of slices by Google Cloud -> the generation, and by how much the number in the name is more
# than that of chips: it counts TensorCores (v2 to v4, v5p) or chips. Sources: the pages of
# https://cloud.google.com/tpu/docs for each generation.
_CLOUD_NAMES = {
    "v2": ("v2", 2),
    "v3": ("v3", 2),
    "v4": ("v4", 2),
    "v5litepod": ("v5e", 1),
    "v5e": ("v5e", 1),
    "v5p": ("v5p", 2),
    "v6e": ("v6e", 1),
}


class Slice(NamedTuple):
    """A slice of TPU chips, read from its name.

    Attributes:
      topology: libtpu's name of the chips, as in "v4:2x2x1".
      config: libtpu's name of a way to see their cores, as in "megacore"; "" for its own choice.
      generation: the generation, with the memory of a core that is seen so.
      chip: the published figures of the chip.
      slices: the number of such slices, which a data center network joins.
    """

    topology: str
    config: str
    generation: Generation
    chip: Chip
    slices: int = 1

    @property
    def rates(self) -> Rates:
        """What one core can do in a second: its share of the chip."""
        cores = self.generation.cores_per_chip
        return Rates(self.chip.peak_flops / cores, self.chip.hbm_bytes_per_second / cores)


# The names that jax's devices have (``device.device_kind``), without "TPU " -> the generation.
_DEVICE_KINDS = {
    "v2": "v2",
    "v3": "v3",
    "v4": "v4",
    "v5 lite": "v5e",
    "v5e": "v5e",
    "v5": "v5p",
    "v5p": "v5p",
    "v6 lite": "v6e",
    "v6e": "v6e",
    "7x": "tpu7x",
    "TPU7x": "tpu7x",
}


def peak_flops_of(device_kind: str) -> float | None:
    """Returns the published peak of a jax device, in bfloat16 operations a second.

    Args:
      device_kind: what ``jax.devices()[0].device_kind`` says, as in "TPU v5 lite".

    Returns:
      The operations of one device, which is a core of a program; None where its peak is not known.
    """
    name = _DEVICE_KINDS.get(device_kind[4:] if device_kind.startswith("TPU ") else device_kind)
    generation = next((one for one in GENERATIONS if one.name == name), None)
    if generation is None:
        return None
    chip = next(chip for chip in CHIPS if chip.name == name)
    return chip.peak_flops / generation.cores_per_chip


def slice_of(topology: str) -> Slice:
    """Reads the name of a slice, or of several that are alike.

    Args:
      topology: libtpu's name of a topology ("v5e:4x4"), or Google Cloud's of a slice
        ("v5litepod-16"); "2xv5e:4x4" for two that a data center network joins. On v4 a core is a
        chip, as with the runtimes of TensorFlow and JAX; behind a topology "/two_cores" makes it
        half a chip.

    Returns:
      The slice.

    Raises:
      ValueError: when there is no such generation, or a name of Google Cloud does not say how its
        chips are arranged.
    """
    several = re.fullmatch(r"([1-9]\d*)x([a-z].*)", topology) if isinstance(topology, str) else None
    if several:
        return slice_of(several[2])._replace(slices=int(several[1]))
    first, slash, config = topology.partition("/") if isinstance(topology, str) else ("", "", "")
    name = _topology_of_cloud(first)
    kind, _, shape = name.partition(":")
    generation = next((g for g in GENERATIONS if g.name == kind and shape), None)
    if generation is None or (slash and (kind, config) != ("v4", _TWO_CORES)):
        raise ValueError(
            f"topology must name a TPU generation and its chips, as in "
            f"{', '.join(repr(g.example) for g in GENERATIONS)} (8 cores each), or a slice of "
            f"Google Cloud, as in 'v4-8' or 'v5litepod-8'; on v4, {_V4_HALF.example!r} has a core "
            f"for each half of a chip; got {topology!r}."
        )
    chip = next(chip for chip in CHIPS if chip.name == kind)
    if slash:
        return Slice(name, "default", _V4_HALF, chip)
    return Slice(name, "megacore" if kind == "v4" else "", generation, chip)


def _topology_of_cloud(name: str) -> str:
    """Returns libtpu's name of a slice that is named as in "v4-8"; other names as they are.

    Slices whose number of chips is a power of two are as close to a square or a cube as can be;
    the smallest ones of a cube are flat, as in 2x2x1.
    """
    match = re.fullmatch(r"(\w+)-(\d+)", name)
    if match is None or match[1] not in _CLOUD_NAMES:
        return name
    kind, cores_per_chip = _CLOUD_NAMES[match[1]]
    chips, rest = divmod(int(match[2]), cores_per_chip)
    doublings = max(chips, 1).bit_length() - 1
    if rest or chips != 2**doublings:
        raise ValueError(
            f"How the chips of {name!r} are arranged, its name does not say: give the topology, as "
            f"in {next(g.example for g in GENERATIONS if g.name == kind)!r}."
        )
    directions = 3 if next(c for c in CHIPS if c.name == kind).links == 6 else 2
    sizes = [2 ** ((doublings + i) // directions) for i in range(directions)]
    if min(sizes) == 1:
        sizes = sizes[::-1] if directions == 3 else sizes
    return f"{kind}:{'x'.join(map(str, sizes))}"
