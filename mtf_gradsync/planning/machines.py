"""Machines to plan for: compile a program for one, and time its collectives."""

from __future__ import annotations

import subprocess
from typing import Callable, Iterator, NamedTuple, Protocol, Sequence

from mtf_gradsync.planning.links import Torus
from mtf_gradsync.simd.program import Program
from mtf_gradsync.xla.topology.chips import slice_of
from mtf_gradsync.xla.topology.compiled import HloCollective
from mtf_gradsync.xla.topology.compiling import Lowered, compile_lowered, lower, places_of
from mtf_gradsync.xla.topology.estimate import CostEstimate

Begun = Callable[["subprocess.Popen[str]"], None]


class SkippedStep(NamedTuple):
    """A step on which all conditions of a program are false, such as one that only accumulates."""

    flops: float  # this and the others as in `Compiled`
    bytes_accessed: float
    estimate_seconds: float
    collectives: tuple[HloCollective, ...] = ()


class Compiled(NamedTuple):
    """The answer of a machine's compiler for one program."""

    error: str = ""  # why the program was refused
    bytes_per_core: int = 0
    flops: float = 0.0  # of one core, by the compiler's count
    bytes_accessed: float = 0.0  # by one core
    estimate_seconds: float = 0.0  # of a core's operations one after the other, without the links
    unknown: int = 0  # custom calls of which the estimate has the bytes alone
    unknown_names: tuple[str, ...] = ()
    loops_counted_once: int = 0  # loops of which the estimate has one turn
    is_of_update: bool = False  # whether it has conditionals, and these figures have all true
    collectives: tuple[HloCollective, ...] = ()
    seconds: float = 0.0  # how long the compilation took
    skipped: SkippedStep | None = None  # where there are conditionals and an estimate of it


class Machine(Protocol):
    """A machine that a step can be planned for."""

    name: str  # the topology, as the user spelled it
    cores: int
    memory_per_core: int | None  # bytes that a program may use; None where there is no limit
    peak_flops_per_core: float | None  # per second; None where that is not known
    bytes_per_second_per_core: float | None  # of its memory; None where that is not known
    estimate_source: str  # where the seconds of an estimate come from, in a word

    def lower(self, program: Program, fetches: Sequence[object]) -> Lowered:
        """A core's program, as `compile` takes it."""

    def compile(self, lowered: Lowered, begun: Begun) -> Compiled:
        """Compiles a program; `begun` is called with each process that is started for it."""

    def seconds(self, operation: str, groups: Sequence[Sequence[int]], size: float) -> float:
        """Seconds that a collective takes besides the estimate; see `Torus.seconds`."""


class TpuMachine:
    """A TPU slice, which this machine need not have; see `Machine`."""

    def __init__(self, topology: str):
        """Asks the compiler where the cores of a topology, as in "v5e:4x4", are."""
        named, places = slice_of(topology), places_of(topology)
        self.name = topology
        self.cores = len(places)
        self.memory_per_core: int | None = named.generation.memory_per_core
        self._torus = Torus(named.chip, places)
        self.peak_flops_per_core: float | None = named.rates.flops
        self.bytes_per_second_per_core: float | None = named.rates.bytes
        self.estimate_source = "roofline"

    def lower(self, program: Program, fetches: Sequence[object]) -> Lowered:
        """See `Machine`."""
        return lower(program, fetches)

    def compile(self, lowered: Lowered, begun: Begun) -> Compiled:
        """See `Machine`. The estimate of a program with conditionals is that of an update step."""
        made = compile_lowered(lowered, self.name, begun=begun)
        if made.memory is None:
            return Compiled(error=made.error, seconds=made.seconds)
        of_update = made.estimates.get("conditions_true")
        cost = of_update or made.estimates["step"]
        none_true = made.estimates.get("conditions_false")
        return Compiled(
            bytes_per_core=made.memory.total,
            flops=cost.flops,
            bytes_accessed=cost.bytes_accessed,
            estimate_seconds=cost.seconds,
            unknown=cost.unknown,
            unknown_names=cost.unknown_operations,
            loops_counted_once=cost.loops_counted_once,
            is_of_update=of_update is not None,
            collectives=made.of_update,
            seconds=made.seconds,
            skipped=_skipped_step(none_true, made.of_skipped_step),
        )

    def seconds(self, operation: str, groups: Sequence[Sequence[int]], size: float) -> float:
        """See `Machine`. The estimate counts a collective's bytes in memory, and no links."""
        return self._torus.seconds(operation, groups, size)


def _skipped_step(
    cost: CostEstimate | None, collectives: tuple[HloCollective, ...]
) -> SkippedStep | None:
    if cost is None:
        return None
    return SkippedStep(cost.flops, cost.bytes_accessed, cost.seconds, collectives)


def factorizations(cores: int, axes: Sequence[str]) -> list[str]:
    """All mesh shapes that arrange a number of cores along mesh axes.

    Args:
      cores: the number of cores.
      axes: names of the mesh axes.

    Returns:
      Mesh shapes as text, as in "batch:4;model:2", those with most cores on the first axis first.

    Raises:
      ValueError: when there is no axis, a name appears twice, or cores is not positive.
    """
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(f"axes must be names of mesh axes, each once; got {list(axes)}")
    if cores < 1:
        raise ValueError(f"cores must be a positive number; got {cores}")
    return [
        ";".join(f"{axis}:{size}" for axis, size in zip(axes, sizes))
        for sizes in _sizes(cores, len(axes))
    ]


def _sizes(cores: int, axes: int) -> Iterator[tuple[int, ...]]:
    if axes == 1:
        yield (cores,)
        return
    for first in range(cores, 0, -1):
        if cores % first == 0:
            for rest in _sizes(cores // first, axes - 1):
                yield (first, *rest)
