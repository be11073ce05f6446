"""Exchanges values of the host between processes."""

from __future__ import annotations

import functools
from typing import Any, Callable, Sequence

import numpy as np

from .devices import OnDevices
from .errors import devices_errors


def exchanged(row: np.ndarray, devices: Sequence[Any], how: str = "gather") -> np.ndarray:
    """Returns the rows of all processes, ``[processes, ...]``, or their sum (`how` is "sum").

    All processes have to call it. The first device of each takes part: once it has the values,
    nothing runs any more.
    """
    import jax

    first = {d.process_index: d for d in reversed(devices)}
    apart, combined = _program(tuple(first[process] for process in sorted(first)), how)
    here = first[devices[0].client.process_index()]
    mine = jax.device_put(row[np.newaxis], here)
    rows = jax.make_array_from_single_device_arrays((len(first), *row.shape), apart, [mine])
    return np.asarray(combined(rows).addressable_data(0))


@functools.lru_cache(maxsize=None)
def _program(devices: tuple[Any, ...], how: str) -> tuple[Any, Callable[[Any], Any]]:
    """Returns a sharding of one row on each device, and a program that sends all to all."""
    import jax

    mesh = jax.sharding.Mesh(np.array(devices), ("process",))
    apart, everywhere = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        for axes in (("process",), ())
    )
    combine = {"gather": lambda rows: rows, "sum": lambda rows: rows.sum(0, rows.dtype)}[how]
    return apart, jax.jit(combine, out_shardings=everywhere)


def on_all_cores(value: OnDevices, devices: Sequence[Any]) -> list[np.ndarray]:
    """Returns the values of the cores of all processes, which all have to call this."""
    with devices_errors():
        mine = [np.array(array) for array in value.arrays]
    if len(mine) == len(devices):
        return mine
    owners = [d.process_index for d in devices]
    most = max(owners.count(owner) for owner in owners)
    # As bytes, because the program that gathers them might round numbers, but not bytes.
    packed = np.zeros((most, mine[0].nbytes), np.uint8)
    for number, array in enumerate(mine):
        packed[number] = np.frombuffer(array.tobytes(), np.uint8)
    gathered = dict(zip(sorted(set(owners)), exchanged(packed, devices)))
    found = []
    for core, owner in enumerate(owners):
        bits = np.ascontiguousarray(gathered[owner][owners[:core].count(owner)])
        found.append(bits.view(mine[0].dtype).reshape(mine[0].shape))
    return found
