"""Makes the CPU devices of a process."""

from __future__ import annotations

import os

from mtf_gradsync._private.jax import backends_are_initialized

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
