"""Finds devices for the cores of a mesh."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync.xla.installed import check_installed
from mtf_gradsync.xla.processes.cpu_devices import COUNT_FLAG, make_cpu_devices
from mtf_gradsync.xla.processes.platforms import leave_absent_tpus_alone


class DevicesError(RuntimeError):
    """jax has no devices for a mesh."""


def devices_for(
    num_cores: int, platform: str | None = None, devices: Sequence[Any] | None = None
) -> list[Any]:
    """The devices that a mesh's cores run on.

    CPU devices are made up to the number that is asked for, as long as jax has not begun.

    Args:
      num_cores: cores of the mesh.
      platform: "cpu", "gpu" ("cuda", "rocm") or "tpu"; None for jax's own choice, which the
        environment variable JAX_PLATFORMS can say.
      devices: jax devices to use in place of the first ones.

    Returns:
      As many jax devices, those of all processes.

    Raises:
      XlaMissingError: when jax is not installed.
      DevicesError: when there is no such platform, or it has too few devices.
    """
    check_installed("jax", "jaxlib")
    if devices is None:
        make_cpu_devices(num_cores)
        devices = _all_devices(platform)
    if len(devices) < num_cores:
        kind = devices[0].platform if devices else platform
        raise DevicesError(
            f"The mesh has {num_cores} cores, and jax has {len(devices)} {kind} "
            f"{'device' if len(devices) == 1 else 'devices'} for them. {_remedy(kind, num_cores)}"
        )
    return list(devices[:num_cores])


def _all_devices(platform: str | None) -> list[Any]:
    leave_absent_tpus_alone()
    import jax

    try:
        return jax.devices(platform)
    except RuntimeError as error:
        asked = f"the platform {platform!r}" if platform else "any platform"
        raise DevicesError(
            f"jax cannot start {asked}: {error} Install the plugin (pip install "
            '"jax[cuda12]" or "jax[tpu]"), ask for another platform, or let the environment '
            "variable JAX_PLATFORMS name one that is there, such as cpu."
        ) from error


def _remedy(kind: str | None, num_cores: int) -> str:
    if kind == "cpu":
        return (
            f"Set XLA_FLAGS={COUNT_FLAG}={num_cores} before jax starts, start more processes, or "
            "take a smaller mesh."
        )
    return (
        "Take a smaller mesh, more machines (mtf_gradsync.xla.start_processes), or let "
        "JAX_PLATFORMS=cpu run it on CPU devices."
    )
