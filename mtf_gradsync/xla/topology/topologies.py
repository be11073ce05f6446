"""The TPU generations that programs can be compiled for, and the memory of their cores."""

from __future__ import annotations

from typing import NamedTuple

_GIB = 2**30


class Generation(NamedTuple):
    """One TPU generation.

    Attributes:
      name: as topology names spell it, as in "v3" of "v3:2x2".
      memory_per_core: bytes of HBM that a program may use on one core.
      example: a topology of this generation with 8 cores.
    """

    name: str
    memory_per_core: int
    example: str


#: The memory is what libtpu 0.0.42.1 calls "available HBM" when it refuses a program that needs
#: more. It is a little less than what Google Cloud's tables give for a chip (16, 32, 32, 16, 95, 32
#: and 192 GB), as the runtime keeps some for itself. libtpu counts half a chip as a core on v2, v3,
#: v4 and tpu7x, and the whole chip on v5e, v5p and v6e.
GENERATIONS = (
    Generation("v2", int(7.48 * _GIB), "v2:2x2"),
    Generation("v3", int(15.48 * _GIB), "v3:2x2"),
    Generation("v4", int(15.25 * _GIB), "v4:2x2x1"),
    Generation("v5e", int(15.75 * _GIB), "v5e:2x4"),
    Generation("v5p", int(95.74 * _GIB), "v5p:2x2x2"),
    Generation("v6e", int(31.25 * _GIB), "v6e:2x4"),
    Generation("tpu7x", int(94.75 * _GIB), "tpu7x:2x2x1"),
)


def generation_of(topology: str) -> Generation:
    """Returns the TPU generation of a topology such as "v3:2x2", or raises a ValueError."""
    name, _, shape = topology.partition(":") if isinstance(topology, str) else ("", "", "")
    for generation in GENERATIONS:
        if generation.name == name and shape:
            return generation
    raise ValueError(
        f"topology must name a TPU generation and its chips, as in "
        f"{', '.join(repr(g.example) for g in GENERATIONS)} (8 cores each); got {topology!r}."
    )
