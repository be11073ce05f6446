"""Finds the devices for the cores of a mesh, or makes CPU devices."""

from __future__ import annotations

import glob
import os
import sys
from importlib import metadata
from typing import Any, Sequence

from mtf_gradsync.extension import check_whole_number
from mtf_gradsync.runtimes._private.jax import backends_are_initialized
from mtf_gradsync.runtimes.processes.members import ProcessesError
from mtf_gradsync.runtimes.xla.installed import check_installed
from mtf_gradsync.runtimes.xla.runner.jax_devices import (
    find_devices,
    first_devices,
    make_cpu_devices,
)

# Device files of a TPU on its host.
_TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")


def leave_absent_tpus_alone() -> None:
    """Keeps jax from looking for a TPU if this machine has none, by setting environment variables.

    If libtpu is installed on a machine without a TPU, jax would query a cloud's metadata server for
    minutes. No environment variable is changed if JAX_PLATFORMS is set, or if jax has started its
    devices already.
    """
    if os.environ.get("JAX_PLATFORMS") or any(glob.glob(p) for p in _TPU_FILES):
        return
    if backends_are_initialized():
        return
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # Platforms that plugins add to jax.
    if not metadata.entry_points(group="jax_plugins"):
        os.environ["JAX_PLATFORMS"] = "cpu"  # for processes that this one starts
        if "jax" in sys.modules:
            import jax

            jax.config.update("jax_platforms", "cpu")


# In older versions, a process waits for others in the collective of one device, while its other
# devices wait for a thread.
_OLDEST_JAXLIB = (0, 4, 33)


def check_jaxlib_for_processes() -> None:
    """Raises a ProcessesError if the installed jaxlib is too old for a mesh of CPU processes.

    Old versions hang in collectives if the mesh has CPU devices of several processes.
    """
    import jaxlib

    if tuple(int(part) for part in jaxlib.__version__.split(".")[:3]) < _OLDEST_JAXLIB:
        oldest = ".".join(map(str, _OLDEST_JAXLIB))
        raise ProcessesError(
            f"CPU devices of several processes need jaxlib {oldest} or later; this is jaxlib "
            f"{jaxlib.__version__}, which hangs in collectives over such devices. Install a later "
            "jaxlib, or use one process."
        )


def devices_for(
    num_cores: int, platform: str | None = None, devices: Sequence[Any] | None = None
) -> list[Any]:
    """Returns the devices for the cores of a mesh.

    If `devices` is None and jax has not started its devices yet, jax is first asked to make a CPU
    device for each core. These CPU devices are used only if the mesh runs on CPUs.

    Args:
      num_cores: the number of cores of the mesh.
      platform: "cpu", "gpu" ("cuda", "rocm") or "tpu"; None for jax's own choice, which the
        environment variable JAX_PLATFORMS can set.
      devices: jax devices, of which the first `num_cores` are used; None for the devices that jax
        has on the platform.

    Returns:
      `num_cores` jax devices; if there are several processes, devices of all processes.

    Raises:
      ValueError: when `num_cores` is not a whole number of 1 or more.
      XlaMissingError: when jax is not installed.
      DevicesError: when jax does not have the platform, or the platform has too few devices.
    """
    num_cores = check_whole_number("num_cores", num_cores)
    check_installed("jax", "jaxlib")
    if devices is not None:
        return first_devices(devices, num_cores)
    if not backends_are_initialized():
        make_cpu_devices(num_cores)
    leave_absent_tpus_alone()
    return find_devices(num_cores, platform)
