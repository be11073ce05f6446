"""The parts and the compiled programs that all sessions on one program share."""

from __future__ import annotations

from typing import NamedTuple, Sequence

from mtf_gradsync._private.jax import compiled_hlo
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.processes.watchdog import beats_go_on
from mtf_gradsync.simd.checks import check_can_be_emulated
from mtf_gradsync.simd.facts import GraphFacts
from mtf_gradsync.simd.program import Program
from mtf_gradsync.simd.session import MasterOps
from mtf_gradsync.xla.devices.cache import Cache
from mtf_gradsync.xla.devices.executable import Lowered, loaded, lowered
from mtf_gradsync.xla.devices.outside import Outside
from mtf_gradsync.xla.lowering.replica_program import ReplicaInput, ReplicaProgram, replica_program
from mtf_gradsync.xla.processes.cores import Cores
from mtf_gradsync.xla.runner.program import LoadedProgram
from mtf_gradsync.xla.topology.collectives import find_hlo_collectives


class Compiled(NamedTuple):
    """A core's program for one set of fetches, ready to run."""

    replica: ReplicaProgram
    lowered: Lowered
    program: LoadedProgram
    inputs: tuple[ReplicaInput, ...]  # the replica's inputs that are tensors
    variables: tuple[ReplicaInput, ...]  # the replica's inputs that are variables


class Parts(NamedTuple):
    """A user's graph, split into its program and the part outside."""

    ops: MasterOps  # on its variables
    facts: GraphFacts  # of the whole graph
    outside: Outside


def parts_of(program: Program, lowerings: Sequence[mtf.Lowering]) -> Parts:
    """Splits a program's graph, after adding the operations that its variables need.

    A graph that cannot run is unchanged, and raises an UnsupportedProgramError.
    """
    check_can_be_emulated(GraphFacts(program.graph.as_graph_def()))
    ops = MasterOps(program.graph, lowerings)
    facts = GraphFacts(program.graph.as_graph_def())
    return Parts(ops, facts, Outside(facts, program.graph, program.name))


class PreparedProgram:
    """A program for devices, compiled for each set of fetches.

    `version` is that of its graph, when the graph was split into `parts`.
    """

    def __init__(
        self, program: Program, lowerings: Sequence[mtf.Lowering], cores: Cores, cache: Cache
    ):
        self.parts = parts_of(program, lowerings)
        self.version = program.graph.version
        self._program = program
        self._cores = cores
        self._cache = cache
        self._compiled: dict[tuple[str, ...], Compiled] = {}

    @property
    def all_compiled(self) -> tuple[Compiled, ...]:
        """What was compiled so far."""
        return tuple(self._compiled.values())

    def compiled(self, inside: tuple[str, ...]) -> Compiled:
        """Returns the program that fetches some tensors; compiles it at the first call.

        Raises a ProcessesError when another process has another program.
        """
        if inside not in self._compiled:
            replica = replica_program(self._program, inside)
            with beats_go_on():  # TensorFlow's bridge keeps Python's lock
                module = lowered(replica, self._cache)
            self._cores.check_same("the programs", module.module.encode())
            program = loaded(module, self._cores.devices, self._cache)
            if not self._cores.is_alone:
                self._cores.check_same("the orders of collectives", _order(program))
            self._compiled[inside] = Compiled(
                replica,
                module,
                program,
                tuple(i for i in replica.inputs if not i.is_variable),
                tuple(i for i in replica.inputs if i.is_variable),
            )
        return self._compiled[inside]


def _order(program: LoadedProgram) -> bytes:
    """Returns the collectives of a compiled program, in the order in which they begin."""
    found = find_hlo_collectives(compiled_hlo(program.executable))
    return repr([(c.operation, c.bytes_per_core, c.groups, c.inside) for c in found]).encode()
