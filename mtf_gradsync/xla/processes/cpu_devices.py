"""Makes the CPU devices of a process."""

from __future__ import annotations

import os

from mtf_gradsync._private.jax import backends_are_initialized
from mtf_gradsync.processes.errors import ProcessesError

_OLDEST_JAXLIB = (0, 4, 33)
COUNT_FLAG = "--xla_force_host_platform_device_count"


def make_cpu_devices(count: int, replace: bool = False) -> None:
    """Asks for as many CPU devices, as long as jax has not begun.

    Args:
      count: devices of this process.
      replace: whether to do so also where XLA_FLAGS asks for some already.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    others = [flag for flag in flags if not flag.startswith(COUNT_FLAG)]
    if (replace or others == flags) and not backends_are_initialized():
        os.environ["XLA_FLAGS"] = " ".join([*others, f"{COUNT_FLAG}={count}"])


def check_keeps_order() -> None:
    """Checks that CPU devices of several processes can be in collectives together.

    Raises:
      ProcessesError: when this version of jaxlib is too old for it: before 0.4.33 a process waits
        for the others in the collective of one device while its other devices wait for a thread.
    """
    import jaxlib

    if tuple(int(part) for part in jaxlib.__version__.split(".")[:3]) < _OLDEST_JAXLIB:
        oldest = ".".join(map(str, _OLDEST_JAXLIB))
        raise ProcessesError(
            f"CPU devices of several processes need jaxlib {oldest} or later; this is "
            f"{jaxlib.__version__}, which stands still in their collectives. Install a later one, "
            "or use one process."
        )
