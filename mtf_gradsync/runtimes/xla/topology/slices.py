"""Parses names of TPU slices, in libtpu's spelling or in Google Cloud's."""

from __future__ import annotations

import re
from typing import NamedTuple

from mtf_gradsync.runtimes.xla.topology.chips import CHIPS, GENERATIONS, Chip, Generation, Rates

_TWO_CORES = "two_cores"
_V4_HALF = Generation("v4", int(15.25 * 2**30), f"v4:2x2x1/{_TWO_CORES}", 2)
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
    """A TPU slice, or several equal ones, as read from a name.

    Attributes:
      topology: libtpu's name of the topology, as in "v4:2x2x1".
      config: libtpu's name for how the cores of a chip are counted: with "megacore" a v4 chip is
        one core, with "default" it is two. "" leaves the choice to libtpu.
      generation: the generation, with the memory of a core as `config` counts cores.
      chip: the published figures of the chip.
      slices: the number of equal TPU slices, joined by a data center network.
    """

    topology: str
    config: str
    generation: Generation
    chip: Chip
    slices: int = 1

    @property
    def rates(self) -> Rates:
        """The rates of one core: the chip's rates divided by its number of cores."""
        cores = self.generation.cores_per_chip
        return Rates(self.chip.peak_flops / cores, self.chip.hbm_bytes_per_second / cores)


def slice_of(topology: str) -> Slice:
    """Parses the name of a TPU slice, or of several equal TPU slices.

    Args:
      topology: libtpu's name of a topology ("v5e:4x4"), or Google Cloud's name of a TPU slice
        ("v5litepod-16"). "2xv5e:4x4" is two TPU slices that a data center network joins. On v4 a
        core is a whole chip, as with the runtimes of TensorFlow and JAX. With "/two_cores" after
        the topology, a core of v4 is half a chip.

    Returns:
      A `Slice`, which describes the TPU slice, or the several equal TPU slices.

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
    """Turns Google Cloud's name of a TPU slice into libtpu's: "v4-8" becomes "v4:2x2x1".

    Other names are returned unchanged. A TPU slice is as close to a square or a cube as possible;
    the smallest TPU slices of three dimensions are flat. Raises a ValueError if the number of chips
    is no power of two, because the name then does not say how the chips are arranged.
    """
    match = re.fullmatch(r"(\w+)-(\d+)", name)
    if match is None or match[1] not in _CLOUD_NAMES:
        return name
    kind, cores_per_chip = _CLOUD_NAMES[match[1]]
    chips, rest = divmod(int(match[2]), cores_per_chip)
    doublings = max(chips, 1).bit_length() - 1
    if rest or chips != 2**doublings:
        raise ValueError(
            f"The name {name!r} does not say how the chips are arranged: give the topology, as in "
            f"{next(g.example for g in GENERATIONS if g.name == kind)!r}."
        )
    directions = 3 if next(c for c in CHIPS if c.name == kind).links == 6 else 2
    sizes = [2 ** ((doublings + i) // directions) for i in range(directions)]
    if min(sizes) == 1:
        sizes = sizes[::-1] if directions == 3 else sizes
    return f"{kind}:{'x'.join(map(str, sizes))}"
