"""Machines to plan for, and the time that collectives take over the links between their chips."""

from __future__ import annotations

import math
import subprocess
from typing import Callable, Iterator, NamedTuple, Protocol, Sequence

from mtf_gradsync.runtimes.simd.program import Program
from mtf_gradsync.runtimes.xla.hlo_collectives import HloCollective
from mtf_gradsync.runtimes.xla.topology.chips import CHIPS, Chip
from mtf_gradsync.runtimes.xla.topology.compiling import (
    LoweredProgram,
    compile_lowered,
    lower,
    places_of,
)
from mtf_gradsync.runtimes.xla.topology.estimate import CostEstimate
from mtf_gradsync.runtimes.xla.topology.slices import slice_of


def bytes_sent(operation: str, members: int, size: float) -> float:
    """Returns the bytes that each member of a ring sends to its neighbour in a collective.

    Args:
      operation: HLO's name of the collective, such as "all-reduce".
      members: the number of members of the ring.
      size: the bytes that each member gives to the collective.

    Returns:
      The bytes; 0 for one member.

    Raises:
      ValueError: when the collective is not known.
    """
    n = members
    if n < 2:
        return 0.0
    factors = {
        "all-reduce": 2 * (n - 1) / n,
        "reduce-scatter": (n - 1) / n,
        "all-gather": n - 1,  # `size` is only a member's part of the result
        # Data for the other side of the ring pass over every link in between.
        "all-to-all": max((n - 1) / n, n / 4),
        "collective-permute": 1.0,
        "collective-broadcast": 1.0,
    }
    if operation not in factors:
        raise ValueError(f"There is no formula for {operation!r}; known are {', '.join(factors)}")
    return factors[operation] * size


def bytes_of_chip(operation: str, cores: float, size: float) -> float:
    """Returns the bytes that a chip gives to a collective if `cores` of its cores give `size` each.

    `operation` is HLO's name of the collective, such as "all-reduce". In an all-gather or
    all-to-all the data of all cores of the chip are sent, so the result is `cores` times `size`.
    In a reduction the cores of a chip first add up their data on the chip, so the result is `size`.
    """
    return cores * size if operation in ("all-gather", "all-to-all") else size


def sequential_hops(operation: str, members: int) -> int:
    """Returns how many hops from chip to chip a collective on a ring makes one after the other.

    `operation` is HLO's name of the collective, such as "all-reduce". `members` is the number of
    chips in the ring. The result is 0 for one chip.
    """
    if members < 2:
        return 0
    if operation == "collective-permute":
        return 1
    return (2 if operation == "all-reduce" else 1) * (members - 1)


#: Seconds that one hop from chip to chip takes, however little is sent; source:
#: https://jax-ml.github.io/scaling-book/sharding ("about 1 us").
HOP_SECONDS = 1e-6


Place = Sequence[int]


class Links(NamedTuple):
    """The links between chips that one group of cores uses in a collective."""

    chips: int  # the number of chips of the group's cores; one chip needs no link
    cores_per_chip: float  # the group's cores on a chip, on average
    # The rate at which a chip sends on all its links, divided among the groups that share them.
    bytes_per_second: float
    is_ring: bool  # whether the links close to a ring in all directions of the group


class Torus:
    """A TPU slice: chips in a grid, with links between neighbours."""

    def __init__(self, chip: Chip, places: Sequence[Place]):
        """Makes a grid of chips.

        Args:
          chip: the kind of chip: its name, links and rates.
          places: the place of each core, in the order of the program's cores. A place is the
            coordinates of the core's chip, followed by the core's number on the chip.
        """
        self._chip = chip
        self._places = [tuple(place) for place in places]
        self._size = tuple(max(column) + 1 for column in zip(*(p[:-1] for p in self._places)))

    @property
    def cores_per_chip(self) -> int:
        """The number of cores on a chip, as the compiler counts cores."""
        return 1 + max(place[-1] for place in self._places)

    def links(self, group: Sequence[int]) -> Links:
        """Returns the links that a group of cores uses in a collective.

        A group of cores uses the links in the smallest box of the grid that holds the group's
        chips. If other cores are in this box, the group gets only its share of the links' rate.

        Args:
          group: the numbers of the cores that exchange data with each other.
        """
        cores = [self._places[core] for core in group]
        chips = {place[:-1] for place in cores}
        if len(chips) < 2:
            return Links(len(chips), len(cores), float("inf"), True)
        columns = list(zip(*chips))
        low, high = [min(c) for c in columns], [max(c) for c in columns]
        extents = [b - a + 1 for a, b in zip(low, high)]
        closed = [
            extent == size and self._chip.links_close_ring(extent, self._size)
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
        """Returns the seconds that a collective takes on the links, if there is no other traffic.

        All groups of cores run the collective at the same time, and the result is the time of the
        slowest group. The time to read and write memory is not counted.

        Args:
          operation: HLO's name of the collective, such as "all-reduce".
          groups: the numbers of the cores in each group. The cores of a group exchange data with
            each other; for "collective-permute" each group is a pair.
          size: the bytes that each core gives to the collective.
        """
        slowest = 0.0
        for links in {self.links(group) for group in groups}:
            wait = (
                sequential_hops(operation, links.chips) * HOP_SECONDS / (2 if links.is_ring else 1)
            )
            put_in = bytes_of_chip(operation, links.cores_per_chip, size)
            sent = bytes_sent(operation, links.chips, put_in)
            slowest = max(slowest, wait, sent / links.bytes_per_second)
        return slowest


Begun = Callable[["subprocess.Popen[str]"], None]


class StepCost(NamedTuple):
    """The cost of a step on one core."""

    cost: CostEstimate  # the cost of the operations one after the other, without the links
    collectives: tuple[HloCollective, ...] = ()


class Compiled(NamedTuple):
    """The answer of a machine's compiler for one program: memory and estimates, or an error."""

    error: str = ""  # why the program was refused
    bytes_per_core: int = 0
    step: StepCost | None = None  # a step with all conditions true; None if refused
    # A step with all conditions false, which only accumulates; None if the program has no
    # conditionals, or was refused.
    skipped: StepCost | None = None
    is_of_update: bool = False  # whether the program has conditionals
    seconds: float = 0.0  # the time of the compilation


class Machine(Protocol):
    """A machine to plan for: its size and its rates, and functions that compile for it."""

    name: str  # the topology, as the user spelled it
    cores: int
    slices: int  # the number of slices that a data center network joins
    dcn_bytes_per_second: float  # the rate at which a chip sends over that network
    memory_per_core: int | None  # bytes that a program may use; None for no limit
    peak_flops_per_core: float | None  # operations per second; None if unknown
    bytes_per_second_per_core: float | None  # the bandwidth of memory; None if unknown
    estimate_source: str  # how times are estimated: see `PlanRow.estimate_source`

    def lower(self, program: Program, fetches: Sequence[object]) -> LoweredProgram:
        """Returns the program of a core in the form that `compile` takes.

        `fetches` are the tensors that a step of the program returns, such as the loss. If the
        program cannot be compiled for any machine, `LoweredProgram.refused` of the result says why.
        """

    def compile(self, lowered: LoweredProgram, begun: Begun) -> Compiled:
        """Compiles a program; returns its memory and estimates, or an error.

        `lowered` is the program, which `lower` has returned. `begun` is a function that is called
        with each process that is started to compile the program, so that the caller can kill the
        process.
        """

    def seconds(self, operation: str, groups: Sequence[Sequence[int]], size: float) -> float:
        """Returns the seconds that a collective takes on the links, not counting access to memory.

        All groups run the collective at the same time. Planning adds the seconds of collectives to
        the estimated time of the step's operations.

        Args:
          operation: HLO's name of the collective, such as "all-reduce".
          groups: the numbers of the cores in each group. The cores of a group exchange data with
            each other.
          size: the bytes that each core gives to the collective.
        """


class TpuMachine:
    """A `Machine` of one TPU slice or several equal ones, which need not exist on this computer."""

    def __init__(
        self, topology: str, dcn_bytes_per_second: float | None = None, by_branches: bool = False
    ):
        """Asks the TPU compiler where the cores of a topology are, and makes the machine.

        Args:
          topology: the TPU slice, such as "v5e:4x4"; "2xv5e:4x4" for two TPU slices.
          dcn_bytes_per_second: the bytes per second that a chip sends over the data center network;
            needed for several TPU slices.
          by_branches: whether a program with one conditional is compiled once in place of three
            times. The costs of a step with and without the update are then found from the branches
            of the one compiled program.

        Raises:
          ValueError: when `topology` has several TPU slices but `dcn_bytes_per_second` is None, or
            when the topology does not exist.
        """
        named = slice_of(topology)
        if named.slices > 1 and dcn_bytes_per_second is None:
            raise ValueError(
                f"The {named.slices} slices of {topology!r} exchange data over a data center "
                "network: give what a chip sends over it, as dcn_bandwidth (in GB/s)."
            )
        places = places_of(topology)
        self.name = topology
        self._by_branches = by_branches
        self.cores = len(places)
        self.slices = named.slices
        self._of_slice = self.cores // self.slices
        self.chips = self.slices * len({place[:-1] for place in places})
        self.memory_per_core: int | None = named.generation.memory_per_core
        self._torus = Torus(named.chip, places[: self._of_slice])
        self.dcn_bytes_per_second = dcn_bytes_per_second or math.inf
        self.peak_flops_per_core: float | None = named.rates.flops
        self.bytes_per_second_per_core: float | None = named.rates.bytes
        self.estimate_source = "roofline"

    def lower(self, program: Program, fetches: Sequence[object]) -> LoweredProgram:
        """Returns the program of a core as StableHLO, or the reason why it is refused.

        `fetches` are the tensors that a step of the program returns, such as the loss.
        """
        return lower(program, fetches)

    def compile(self, lowered: LoweredProgram, begun: Begun) -> Compiled:
        """Compiles a program for this topology; returns its memory and estimates, or an error.

        `lowered` is the program, which `lower` has returned. If the program has conditionals,
        `Compiled.step` of the result describes a step with the update, and `Compiled.skipped` a
        step without the update. `begun` is a function that is called with each process that is
        started to compile the program, so that the caller can kill the process.
        """
        made = compile_lowered(lowered, self.name, begun=begun, by_branches=self._by_branches)
        if made.memory is None:
            return Compiled(made.error, seconds=made.seconds)
        costs = made.estimates
        skipped = costs.get("conditions_false")
        return Compiled(
            bytes_per_core=made.memory.total,
            step=StepCost(costs.get("conditions_true") or costs["step"], made.of_update),
            skipped=StepCost(skipped, made.of_skipped_step) if skipped else None,
            is_of_update="conditions_true" in costs,
            seconds=made.seconds,
        )

    def seconds(self, operation: str, groups: Sequence[Sequence[int]], size: float) -> float:
        """Returns the seconds that a collective takes on the links or the data center network.

        The time in which a collective reads and writes memory is not counted here, because the
        estimate of a step's operations has it already.

        Args:
          operation: HLO's name of the collective, such as "all-reduce".
          groups: the numbers of the cores in each group. The cores of a group exchange data with
            each other. Each group lies in one TPU slice, or consists of the cores at the same place
            of several TPU slices. If the groups are over several TPU slices, the cores of a chip
            share the chip's rate over the network.
          size: the bytes that each core gives to the collective.
        """
        if any(group[0] // self._of_slice != group[-1] // self._of_slice for group in groups):
            count = max(map(len, groups))
            sent = bytes_sent(operation, count, size)
            if operation == "all-to-all":  # a network, unlike a ring, passes nothing on
                sent = (count - 1) / count * size
            return self._torus.cores_per_chip * sent / self.dcn_bytes_per_second
        local = [[core % self._of_slice for core in group] for group in groups]
        return self._torus.seconds(operation, local, size)


def topology_of(chips: str) -> str:
    """Returns the topology for a number of chips, such as "v5e:16x16" for "v5e:256".

    `chips` is the kind and number of chips of a TPU slice. For two equal TPU slices "2x" stands in
    front ("2xv5e:256"). The chips of a TPU slice are arranged as close to a square or cube as
    possible. `chips` is returned unchanged if it already names a topology, or has an unknown kind
    of chip.

    Raises:
      ValueError: when the number of chips is no power of two, so that the arrangement is unknown.
    """
    slices, _, rest = chips.rpartition("x") if ":" in chips.rpartition("x")[2] else ("", "", chips)
    kind, _, count = rest.partition(":")
    if not count.isdecimal():
        return chips
    doublings = int(count).bit_length() - 1
    known = next((chip for chip in CHIPS if chip.name == kind), None)
    if known is None or int(count) < 1:
        return chips  # `slice_of` will raise an error that lists the known kinds
    if int(count) != 2**doublings:
        raise ValueError(
            f"The number does not say how {count} chips of {kind} are arranged: give the "
            f"topology, as in {slice_of(f'{kind}:2x2x2').generation.example!r}, or a power of two."
        )
    directions = 3 if known.links == 6 else 2
    sizes = [2 ** ((doublings + i) // directions) for i in range(directions)]
    ordered = "x".join(map(str, sizes[::-1] if 1 in sizes and directions == 3 else sizes))
    return f"{slices}x{kind}:{ordered}" if slices else f"{kind}:{ordered}"


def factorizations(cores: int, axes: Sequence[str]) -> list[str]:
    """Returns all mesh shapes that arrange a number of cores along mesh axes.

    Args:
      cores: the number of cores.
      axes: names of the mesh axes.

    Returns:
      Mesh shapes as text, such as "batch:4;model:2". Those with more cores on the first axis come
      before those with fewer.

    Raises:
      ValueError: when there is no axis, a name appears twice, or `cores` is not positive.
    """
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(f"axes must be names of mesh axes, each once; got {list(axes)}")
    if cores < 1:
        raise ValueError(f"cores must be a positive number; got {cores}")
    return [
        ";".join(f"{axis}:{size}" for axis, size in zip(axes, sizes))
        for sizes in _sizes(cores, len(axes))
    ]


def shapes_of(cores: int, axes: Sequence[str], slices: int) -> list[str]:
    """Returns all mesh shapes that a machine's cores can have, such as "batch:4;model:2".

    The first axis of a mesh shape crosses the data center network between TPU slices. So, with
    several TPU slices, the same sizes of the axes give several mesh shapes. Each axis whose size is
    a multiple of the number of TPU slices comes first in one of these shapes.

    Args:
      cores: the number of the machine's cores, of all TPU slices together.
      axes: names of the mesh axes.
      slices: the number of TPU slices that the data center network joins.
    """
    found = []
    for shape in factorizations(cores, axes):
        dims = shape.split(";")
        firsts = [dim for dim in dims if slices > 1 and int(dim.split(":")[1]) % slices == 0]
        for first in firsts or dims[:1]:
            found.append(";".join([first, *(dim for dim in dims if dim != first)]))
    return found


def _sizes(cores: int, axes: int) -> Iterator[tuple[int, ...]]:
    if axes == 1:
        yield (cores,)
        return
    for first in range(cores, 0, -1):
        if cores % first == 0:
            for rest in _sizes(cores // first, axes - 1):
                yield (first, *rest)
