"""Makes the CPU devices of a process."""

from __future__ import annotations

from mtf_gradsync._private.jax import backends_are_initialized
from mtf_gradsync.processes.errors import ProcessesError
from mtf_gradsync.xla.runner.devices import make_cpu_devices

# Before it, a process waits for the others in the collective of one device while its other devices
# wait for a thread.
_OLDEST_JAXLIB = (0, 4, 33)


def ask_for_cpu_devices(count: int, replace: bool = False) -> None:
    """Makes CPU devices as `make_cpu_devices` does, as long as jax has not begun."""
    if not backends_are_initialized():
        make_cpu_devices(count, replace)


def check_keeps_order() -> None:
    """Raises a ProcessesError if CPU devices of several processes cannot share collectives."""
    import jaxlib

    if tuple(int(part) for part in jaxlib.__version__.split(".")[:3]) < _OLDEST_JAXLIB:
        oldest = ".".join(map(str, _OLDEST_JAXLIB))
        raise ProcessesError(
            f"CPU devices of several processes need jaxlib {oldest} or later; this is "
            f"{jaxlib.__version__}, which hangs in their collectives. Install a later one, "
            "or use one process."
        )
