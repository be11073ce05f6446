"""The cores of this process, and the exchange of values with those of other processes."""

from __future__ import annotations

import collections
from typing import Any, Callable, Sequence, TypeVar

import numpy as np

from mtf_gradsync.processes.errors import ProcessesError
from mtf_gradsync.xla.processes import gathering
from mtf_gradsync.xla.processes.cpu_devices import check_keeps_order

_Result = TypeVar("_Result")


class Cores:
    """The cores of a program, one jax device each: all of this process, or equally many of each.

    All processes have to call its methods, with values of the same number and shapes.

    Attributes:
      devices: devices of all cores, in physical order.
      local: numbers of this process's cores.
      local_devices: their devices.
    """

    def __init__(self, devices: Sequence[Any]):
        self.devices = list(devices)
        self._me = devices[0].client.process_index()
        self._owners = [d.process_index for d in devices]
        self.local = [core for core, owner in enumerate(self._owners) if owner == self._me]
        self.local_devices = [devices[core] for core in self.local]
        if not self.is_alone:
            if devices[0].platform == "cpu":
                check_keeps_order()
            self._check_shares()

    @property
    def is_alone(self) -> bool:
        """Whether this process has all of them."""
        return len(self.local) == len(self.devices)

    @property
    def is_first(self) -> bool:
        """Whether this process does what one of them does for all."""
        return self.is_alone or self._me == 0

    def gather(self, local: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """Returns values on all cores, value by value, from those that each process has."""
        if self.is_alone:
            return [list(per_core) for per_core in local]
        stacked = gathering.all_gathered([np.stack(per_core) for per_core in local])
        rows: dict[int, int] = collections.defaultdict(int)
        where = []
        for owner in self._owners:
            where.append((owner, rows[owner]))
            rows[owner] += 1
        return [[value[process][row] for process, row in where] for value in stacked]

    def from_first(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the values of the first process, on all processes."""
        return list(values) if self.is_alone else gathering.from_first(values)

    def together(self, work: Callable[[], _Result]) -> _Result:
        """See `gathering.together`."""
        return work() if self.is_alone else gathering.together(work)

    def check_same(self, what: str, content: bytes) -> None:
        """See `gathering.check_same`."""
        if not self.is_alone:
            gathering.check_same(what, content)

    def _check_shares(self) -> None:
        import jax

        count = jax.process_count(self.devices[0].platform)
        shares = collections.Counter(self._owners)
        if len({shares[process] for process in range(count)}) > 1:
            said = ", ".join(f"process {p} has {shares[p]}" for p in range(count))
            raise ProcessesError(
                f"Every process must have as many cores of the mesh, but of {len(self.devices)} "
                f"cores {said}. Take a mesh whose size is a multiple of {count}, and give every "
                f"process {-(-len(self.devices) // count)} devices (cpu_devices of "
                "start_processes, for CPU devices)."
            )
