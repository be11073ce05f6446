"""Finds devices for the cores of a mesh."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync.xla.installed import check_installed
from mtf_gradsync.xla.processes.cpu_devices import ask_for_cpu_devices
from mtf_gradsync.xla.processes.platforms import leave_absent_tpus_alone
from mtf_gradsync.xla.runner.devices import check_count, find_devices


def devices_for(
    num_cores: int, platform: str | None = None, devices: Sequence[Any] | None = None
) -> list[Any]:
    """Returns the devices for the cores of a mesh.

    CPU devices are created as needed, as long as jax has not begun.

    Args:
      num_cores: cores of the mesh.
      platform: "cpu", "gpu" ("cuda", "rocm") or "tpu"; None for jax's own choice, which the
        environment variable JAX_PLATFORMS can set.
      devices: jax devices to use in place of the first ones.

    Returns:
      As many jax devices, those of all processes.

    Raises:
      XlaMissingError: when jax is not installed.
      DevicesError: when there is no such platform, or it has too few devices.
    """
    check_installed("jax", "jaxlib")
    if devices is not None:
        return check_count(devices, num_cores)
    ask_for_cpu_devices(num_cores)
    leave_absent_tpus_alone()
    return find_devices(num_cores, platform)
