"""The variables of a program: on the devices while it runs, in TensorFlow otherwise."""

from __future__ import annotations

import hashlib
from typing import Any, Iterable, Sequence, cast

import numpy as np

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import with_own_types
from mtf_gradsync.simd.variable_access import VariableAccess
from mtf_gradsync.xla.lowering.replica_program import ReplicaInput
from mtf_gradsync.xla.processes.cores import Cores
from mtf_gradsync.xla.runner.devices import OnDevices, put


class DeviceVariables:
    """Knows where the newest value of each variable is, and copies it where it is needed."""

    def __init__(self, session: tf.Session, cores: Cores):
        """Begins with all values in TensorFlow.

        Args:
          session: a session that has the variables under their names in the user's graph.
          cores: the program's cores, and which of them are this process's.
        """
        self._session = session
        self._cores = cores
        self._access = VariableAccess(session.graph)
        self._on_devices: dict[tuple[str, ...], OnDevices] = {}
        self._newer: set[tuple[str, ...]] = (
            set()
        )  # variables whose value on the devices is newer than TensorFlow's
        self._keys: dict[str, set[tuple[str, ...]]] = {}

    def share(self) -> None:
        """Gives all processes the first one's values, since initial values may be random.

        With several processes, all have to call it.
        """
        if self._cores.is_alone:
            return
        values = self._session.run(self._access.read)
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

    def take(self, variables: Sequence[ReplicaInput]) -> list[OnDevices]:
        """Returns the values of variables on the devices, after copying those not there yet."""
        missing = [v for v in variables if v.sources not in self._on_devices]
        local = self._cores.local
        names = {v.sources[c] for v in missing for c in local}
        values = self._session.run({name: self._access.read[name] for name in sorted(names)})
        for variable in missing:
            self._on_devices[variable.sources] = put(
                [values[variable.sources[c]] for c in local], self._cores.local_devices
            )
            for source in variable.sources:
                self._keys.setdefault(source, set()).add(variable.sources)
        return [self._on_devices[v.sources] for v in variables]

    def put(self, variable: ReplicaInput, value: OnDevices) -> None:
        """Stores a new value that a step has left on the devices."""
        self._on_devices[variable.sources] = value
        self._newer.add(variable.sources)

    def copy_to_tensorflow(self, names: Iterable[str] | None = None) -> None:
        """Copies values from the devices to TensorFlow where those are newer.

        With several processes, all have to call it with the same names.

        Args:
          names: names of the variables to copy; None for all.
        """
        keys = self._newer
        if names is not None:
            keys = {k for name in names for k in self._keys.get(name, ())} & self._newer
        if not keys:
            return
        # One order on all processes.
        wanted = sorted(keys)
        values: dict[str, np.ndarray] = {}
        sliced: list[tuple[str, ...]] = []
        for key in wanted:
            if len(set(key)) == 1:
                # All cores share the variable, and have the same value.
                values[key[0]] = np.array(self._on_devices[key].arrays[0])
            else:
                sliced.append(key)
        local = [[np.array(a) for a in self._on_devices[k].arrays] for k in sliced]
        if local:
            for key, per_core in zip(sliced, self._cores.gather(local)):
                values.update(zip(key, per_core))
        self._access.set(self._session, ((n, with_own_types(v)) for n, v in values.items()))
        self._newer -= keys

    def wait(self) -> None:
        """Waits until all values are there."""
        for value in self._on_devices.values():
            for array in value.arrays:
                array.block_until_ready()

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Drops values on the devices, because TensorFlow's have changed.

        Args:
          names: names of the variables that have; None for all.
        """
        keys = set(self._on_devices)
        if names is not None:
            keys = {k for name in names for k in self._keys.get(name, ())}
        for key in keys:
            self._on_devices.pop(key, None)
        self._newer -= keys
