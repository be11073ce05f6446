"""What can be planned for: what it makes of a program, and how long its collectives take."""

from __future__ import annotations

import subprocess
from typing import Callable, NamedTuple, Protocol, Sequence

from mtf_gradsync.planning.chips import chip_of
from mtf_gradsync.planning.torus import Torus
from mtf_gradsync.simd.program import Program
from mtf_gradsync.xla.topology.collectives import HloCollective
from mtf_gradsync.xla.topology.compiling import Lowered, compile_lowered, lower, places_of
from mtf_gradsync.xla.topology.topologies import generation_of

Begun = Callable[["subprocess.Popen[str]"], None]


class Compiled(NamedTuple):
    """What a machine's compiler says of one program.

    Attributes:
      error: why it was refused; "" where it was not.
      bytes_per_core: memory that it takes.
      flops: floating-point operations of one core.
      bytes_accessed: bytes that one core's operations read and write.
      estimate_seconds: how long the operations of a core take one after the other, without what
        goes over links.
      unknown: operations that are not in the estimate.
      collectives: of the compiled program.
      seconds: how long compiling took.
    """

    error: str = ""
    bytes_per_core: int = 0
    flops: float = 0.0
    bytes_accessed: float = 0.0
    estimate_seconds: float = 0.0
    unknown: int = 0
    collectives: tuple[HloCollective, ...] = ()
    seconds: float = 0.0


class Machine(Protocol):
    """A machine with a number of cores.

    Attributes:
      name: as it was asked for.
      cores: how many it has.
      memory_per_core: bytes that a program may use on one; None where there is no limit.
      peak_flops_per_core: operations per second; None where that is not known.
    """

    name: str
    cores: int
    memory_per_core: int | None
    peak_flops_per_core: float | None

    def lower(self, program: Program, fetches: Sequence[object]) -> Lowered:
        """The program of a core; equal ones are compiled once."""

    def compile(self, lowered: Lowered, begun: Begun) -> Compiled:
        """Compiles it; `begun` is called with each process that is started for it."""

    def seconds(self, operation: str, groups: Sequence[Sequence[int]], size: float) -> float:
        """How long a collective takes beside what the estimate holds; see `Torus.seconds`."""


class TpuMachine:
    """A TPU slice that need not be there; see `Machine`."""

    def __init__(self, topology: str):
        """Asks the compiler where the slice's cores are.

        Args:
          topology: as in "v5e:4x4".

        Raises:
          XlaMissingError: when there is no TPU compiler.
          ValueError: when there is no such topology.
        """
        generation = generation_of(topology)
        chip, places = chip_of(topology), places_of(topology)
        self.name = topology
        self.cores = len(places)
        self.memory_per_core: int | None = generation.memory_per_core
        self._torus = Torus(chip, places)
        self.peak_flops_per_core: float | None = chip.peak_flops / self._torus.cores_per_chip

    def lower(self, program: Program, fetches: Sequence[object]) -> Lowered:
        """See `Machine`."""
        return lower(program, fetches)

    def compile(self, lowered: Lowered, begun: Begun) -> Compiled:
        """See `Machine`. A program with conditions has the estimate of an update step."""
        made = compile_lowered(lowered, self.name, begun=begun)
        if made.memory is None:
            return Compiled(error=made.error, seconds=made.seconds)
        cost = made.estimates.get("conditions_true", made.estimates["step"])
        return Compiled(
            bytes_per_core=made.memory.total,
            flops=cost.flops,
            bytes_accessed=cost.bytes_accessed,
            estimate_seconds=cost.seconds,
            unknown=cost.unknown,
            collectives=made.after,
            seconds=made.seconds,
        )

    def seconds(self, operation: str, groups: Sequence[Sequence[int]], size: float) -> float:
        """See `Machine`. The estimate has what a collective reads and writes, and no links."""
        return self._torus.seconds(operation, groups, size)
