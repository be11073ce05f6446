"""The parts and the compiled programs that all sessions on one program share."""

from __future__ import annotations

import hashlib
from typing import Any, Iterable, NamedTuple, Sequence, cast

import numpy as np

from mtf_gradsync.extension import mtf, tf
from mtf_gradsync.runtimes._private.jax import compiled_hlo
from mtf_gradsync.runtimes._private.tensorflow import with_own_types
from mtf_gradsync.runtimes.processes.watchdog import beats_go_on
from mtf_gradsync.runtimes.simd.checks import check_can_be_emulated
from mtf_gradsync.runtimes.simd.facts import GraphFacts
from mtf_gradsync.runtimes.simd.program import Program
from mtf_gradsync.runtimes.simd.session import MasterOps, VariableAccess
from mtf_gradsync.runtimes.xla.collectives import find_hlo_collectives
from mtf_gradsync.runtimes.xla.executable import Cache, CoreModule, loaded, lowered
from mtf_gradsync.runtimes.xla.gathering import Cores, checksums_on
from mtf_gradsync.runtimes.xla.outside import Outside
from mtf_gradsync.runtimes.xla.replica_program import ReplicaInput, ReplicaProgram, replica_program
from mtf_gradsync.runtimes.xla.runner.devices import DeviceValues, put
from mtf_gradsync.runtimes.xla.runner.program import LoadedProgram


class CompiledCore(NamedTuple):
    """A core's program for one set of fetches, ready to run."""

    replica: ReplicaProgram
    lowered: CoreModule
    program: LoadedProgram
    inputs: tuple[ReplicaInput, ...]  # the replica's inputs that are tensors
    variables: tuple[ReplicaInput, ...]  # the replica's inputs that are variables


class Parts(NamedTuple):
    """A user's graph, split into its program and the part outside."""

    ops: MasterOps  # on its variables
    facts: GraphFacts  # of the whole graph
    outside: Outside


def split_program(program: Program, lowerings: Sequence[mtf.Lowering]) -> Parts:
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
        self.parts = split_program(program, lowerings)
        self.version = program.graph.version
        self._program = program
        self._cores = cores
        self._cache = cache
        self._compiled: dict[tuple[str, ...], CompiledCore] = {}

    @property
    def all_compiled(self) -> tuple[CompiledCore, ...]:
        """What was compiled so far."""
        return tuple(self._compiled.values())

    def compiled(self, inside: tuple[str, ...]) -> CompiledCore:
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
            self._compiled[inside] = CompiledCore(
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


class DeviceVariables:
    """Knows where the newest value of each variable is, and copies it where it is needed.

    All values begin in `session`, which has the variables under their names in the user's graph.
    With several processes, all have to make the same calls.
    """

    def __init__(self, session: tf.Session, cores: Cores):
        self._session = session
        self._cores = cores
        self._access = VariableAccess(session.graph)
        self._on_devices: dict[tuple[str, ...], DeviceValues] = {}
        # The keys of values on the devices that are newer than TensorFlow's.
        self._newer: set[tuple[str, ...]] = set()
        # For each variable's name the keys that have it: a key is `ReplicaInput.sources`.
        self._keys: dict[str, set[tuple[str, ...]]] = {}

    def share(self) -> None:
        """Gives all processes the first process's values in TensorFlow, but for strings.

        Initial values may be random, and so differ.
        """
        if self._cores.is_alone:
            return
        values = self._access.read_all(self._session)
        names = sorted(name for name, value in values.items() if value.dtype != object)
        digests = [
            np.frombuffer(hashlib.sha256(cast("Any", array)).digest(), np.uint8)
            for array in (np.ascontiguousarray(values[n]) for n in names)
        ]
        shared = self._cores.from_first(digests)
        differs = [not np.array_equal(own, first) for own, first in zip(digests, shared)]
        anywhere = np.any(self._cores.gather([[np.array(differs)] * len(self._cores.local)])[0], 0)
        wanted = [name for name, one in zip(names, anywhere) if one]
        found = self._cores.from_first([np.asarray(values[n]) for n in wanted])
        self._access.set(self._session, zip(wanted, found))

    def take(self, variables: Sequence[ReplicaInput]) -> list[DeviceValues]:
        """Returns the values of variables on the devices, after copying those not there yet."""
        missing = [v for v in variables if v.sources not in self._on_devices]
        local = self._cores.local
        names = {v.sources[c] for v in missing for c in local}
        values = self._session.run({name: self._access.read[name] for name in sorted(names)})
        for variable in missing:
            # Copies: a step may write over the memory, and cores may have the same source.
            self._on_devices[variable.sources] = put(
                [np.array(values[variable.sources[c]]) for c in local], self._cores.local_devices
            )
            for source in variable.sources:
                self._keys.setdefault(source, set()).add(variable.sources)
        return [self._on_devices[v.sources] for v in variables]

    def put(self, variable: ReplicaInput, value: DeviceValues) -> None:
        """Takes over a variable's new value, which a step has left on the devices."""
        self._on_devices[variable.sources] = value
        self._newer.add(variable.sources)

    def copy_to_tensorflow(self, names: Iterable[str] | None = None) -> None:
        """Copies the named variables, or all, to TensorFlow where the devices' values are newer."""
        keys = self._keys_of(names) & self._newer
        if not keys:
            return
        # A variable that all cores share has the same value on all of them.
        shared = [key for key in keys if len(set(key)) == 1]
        values = {key[0]: np.asarray(self._on_devices[key].arrays[0]) for key in shared}
        sliced = sorted(keys.difference(shared))  # in one order on all processes
        local = [[np.asarray(a) for a in self._on_devices[k].arrays] for k in sliced]
        if local:
            for key, per_core in zip(sliced, self._cores.gather(local)):
                values.update(zip(key, per_core))
        self._access.set(self._session, ((n, with_own_types(v)) for n, v in values.items()))
        self._newer -= keys

    def checksums(self) -> dict[tuple[str, ...], list[Any]]:
        """Computes a checksum of each value on each core, where it lies.

        Returns:
          For each value on the devices, by its names in TensorFlow: the checksums of all cores.
        """
        keys = sorted(self._on_devices)
        if not keys:
            return {}
        local = checksums_on(self._cores.devices, [self._on_devices[key] for key in keys])
        (of_cores,) = self._cores.gather([local])
        return {key: [sums[n] for sums in of_cores] for n, key in enumerate(keys)}

    def values_on_cores(self, names: Sequence[str]) -> list[np.ndarray]:
        """Returns the values on the cores that hold these variables of TensorFlow.

        Several cores may hold one: then `names` are those of all cores.
        """
        key = next(key for key in self._on_devices if names[0] in key)
        local = [np.asarray(array) for array in self._on_devices[key].arrays]
        (of_cores,) = self._cores.gather([local])
        places = range(len(key)) if len(set(key)) == 1 else map(key.index, names)
        return [of_cores[place] for place in places]

    def wait(self) -> None:
        """Waits until the devices have computed all values of variables."""
        for value in self._on_devices.values():
            for array in value.arrays:
                array.block_until_ready()

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Drops the devices' values of the named variables, or all, even newer ones.

        It is for variables that changed in TensorFlow; `take` copies them again.
        """
        keys = self._keys_of(names)
        for key in keys:
            self._on_devices.pop(key, None)
        self._newer -= keys

    def _keys_of(self, names: Iterable[str] | None) -> set[tuple[str, ...]]:
        if names is None:
            return set(self._on_devices)
        return {key for name in names for key in self._keys.get(name, ())}
