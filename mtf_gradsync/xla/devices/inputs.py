"""Brings a program's inputs, tensors from outside, to the devices."""

from __future__ import annotations

from typing import Any, Collection, Sequence

import numpy as np

from mtf_gradsync.simd.facts import split_input
from mtf_gradsync.xla.devices.outside import Outside
from mtf_gradsync.xla.lowering.replica_program import ReplicaInput
from mtf_gradsync.xla.processes.cores import Cores
from mtf_gradsync.xla.runner.devices import OnDevices, put


class DeviceInputs:
    """Brings inputs to the devices; inputs that are the same in every step only once."""

    def __init__(self, outside: Outside, cores: Cores):
        self._outside = outside
        self._cores = cores
        # For inputs that are made of constants: the operations that they are made of.
        self._constant: dict[tuple[str, ...], set[str] | None] = {}
        self._kept: dict[tuple[str, ...], OnDevices] = {}

    def sources(self, inputs: Sequence[ReplicaInput], fed: Collection[str]) -> set[str]:
        """Returns the names of the tensors to fetch outside before a step that feeds `fed`."""
        wanted = [i for i in inputs if not self._is_kept(i, fed)]
        names = {i.sources[c] for i in wanted for c in self._cores.local}
        for name in sorted(names):
            if self._outside.is_after(name):
                raise ValueError(
                    f"The program's input {name!r} is made from what the program returns. Fetch it "
                    "in one step and feed it in the next."
                )
        return names

    def put(
        self, inputs: Sequence[ReplicaInput], values: dict[str, Any], fed: Collection[str]
    ) -> list[OnDevices]:
        """Puts a step's inputs on the devices: the values of `sources`, and those that are fed."""
        copies: dict[str, np.ndarray] = {}

        def given(name: str) -> Any:
            if not fed:
                return values[name]
            # A copy: a fed array is the caller's, who may write to it while the step runs.
            if name not in copies:
                copies[name] = np.array(values[name])
            return copies[name]

        found = []
        for one in inputs:
            if self._is_kept(one, fed):
                found.append(self._kept[one.sources])
                continue
            per_core = [given(one.sources[c]) for c in self._cores.local]
            found.append(put(per_core, self._cores.local_devices))
            if self._is_constant(one, fed):
                self._kept[one.sources] = found[-1]
        return found

    def _is_kept(self, one: ReplicaInput, fed: Collection[str]) -> bool:
        return one.sources in self._kept and self._is_constant(one, fed)

    def _is_constant(self, one: ReplicaInput, fed: Collection[str]) -> bool:
        """Returns whether an input has the same value in every step, unless it is fed."""
        if one.sources not in self._constant:
            is_fixed = all(self._outside.is_fixed(name) for name in set(one.sources))
            self._constant[one.sources] = self._outside.ancestors(one.sources) if is_fixed else None
        made_of = self._constant[one.sources]
        return made_of is not None and not any(split_input(name)[0] in made_of for name in fed)
