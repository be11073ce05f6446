"""The published figures of TPU chips and their generations."""

from __future__ import annotations

from typing import NamedTuple

_CLOUD = "https://cloud.google.com/tpu/docs"
_V2_V3 = "https://doi.org/10.1145/3360307"
_V4 = "https://arxiv.org/abs/2304.01433"
_BOOK = "https://jax-ml.github.io/scaling-book"
_GIB = 2**30


class Chip(NamedTuple):
    """The published figures of one TPU chip. Rates are per chip and per second.

    Attributes:
      name: the chip's name in names of topologies: "v5e" in "v5e:4x4", for example.
      peak_flops: peak of floating-point operations in bfloat16.
      hbm_bytes: size of the memory.
      hbm_bytes_per_second: bytes read from the memory and written to it.
      links: the number of links to neighbouring chips.
      link_bytes_per_second: bytes over one link in one direction.
      full_ring: how many chips a direction must have, at least, so that its links close to a ring;
        this is the size of a whole pod. 0 if optical switches close the rings. Optical switches
        close rings in TPU slices whose sizes are multiples of 4 along all directions.
      sources: web addresses of the sources: for the chip's figures, and for the links' figures.
    """

    name: str
    peak_flops: float
    hbm_bytes: float
    hbm_bytes_per_second: float
    links: int
    link_bytes_per_second: float
    full_ring: int
    sources: tuple[str, ...]

    def links_close_ring(self, length: int, lengths: tuple[int, ...]) -> bool:
        """Returns whether the links along one direction of a TPU slice close to a ring.

        The rule is from https://jax-ml.github.io/scaling-book/tpus (networking).

        Args:
          length: the number of chips along the direction, such as 4.
          lengths: the numbers of chips along all directions of the TPU slice, such as (4, 8).
        """
        if self.full_ring:
            return length >= self.full_ring
        return length > 1 and all(size % 4 == 0 for size in lengths if size > 1)


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
    """The rates of one core: floating-point operations, and bytes of its memory, per second."""

    flops: float  # floating-point operations of multiplications in bfloat16
    bytes: float  # bytes that the core reads from its memory and writes to it


class Generation(NamedTuple):
    """A TPU generation: how programs count the cores of a chip, and the memory of a core.

    Attributes:
      name: the generation's name in names of topologies: "v3" in "v3:2x2", for example.
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
    """Returns the published peak of a jax device, in bfloat16 operations per second.

    Args:
      device_kind: what ``jax.devices()[0].device_kind`` says, as in "TPU v5 lite".

    Returns:
      The peak of one device, which is a core of a program; None if it is not known.
    """
    name = _DEVICE_KINDS.get(device_kind[4:] if device_kind.startswith("TPU ") else device_kind)
    generation = next((one for one in GENERATIONS if one.name == name), None)
    if generation is None:
        return None
    chip = next(chip for chip in CHIPS if chip.name == name)
    return chip.peak_flops / generation.cores_per_chip
