"""Which cores of a program are this process's, and how the others' values get here."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np


class Cores:
    """The cores of a program, one jax device each.

    Attributes:
      devices: of all cores, in physical order.
      local: numbers of this process's cores.
      local_devices: their devices.
    """

    def __init__(self, devices: Sequence[Any]):
        self.devices = list(devices)
        me = devices[0].client.process_index()
        self.local = [core for core, d in enumerate(devices) if d.process_index == me]
        self.local_devices = [devices[core] for core in self.local]
        self._owners = [d.process_index for d in devices]

    @property
    def is_alone(self) -> bool:
        """Whether this process has all of them."""
        return len(self.local) == len(self.devices)

    def gather(self, local: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """Values on all cores, from those that each process has.

        All processes have to call it with as many values of the same shapes.

        Args:
          local: for each value, for each of this process's cores: an array.

        Returns:
          For each value, for each core: an array.
        """
        if self.is_alone:
            return [list(per_core) for per_core in local]
        from mtf_gradsync.xla.processes.gathering import all_gathered

        stacked = all_gathered([np.stack(per_core) for per_core in local])
        place: dict[int, int] = {}
        where = []
        for owner in self._owners:
            where.append((sorted(set(self._owners)).index(owner), place.setdefault(owner, 0)))
            place[owner] += 1
        return [[value[process][row] for process, row in where] for value in stacked]
