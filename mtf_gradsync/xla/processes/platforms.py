"""Keeps jax from waiting for devices that do not exist."""

from __future__ import annotations

import glob
import os
import sys
from importlib import metadata
from typing import Any

from mtf_gradsync._private.jax import backends_are_initialized

# Device files of a TPU on its host.
_TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")


def leave_absent_tpus_alone() -> None:
    """Keeps jax from looking for a TPU where libtpu is installed, but there is none.

    It would query a cloud's metadata server for minutes. A user's JAX_PLATFORMS is not changed.
    """
    if os.environ.get("JAX_PLATFORMS") or any(glob.glob(p) for p in _TPU_FILES):
        return
    if backends_are_initialized():
        return
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    if not _has_plugins():
        os.environ["JAX_PLATFORMS"] = "cpu"  # for processes that this one starts
        if "jax" in sys.modules:
            import jax

            jax.config.update("jax_platforms", "cpu")


def _has_plugins() -> bool:
    """Returns whether platforms are installed beside jax's own."""
    groups: Any = metadata.entry_points()
    if hasattr(groups, "select"):
        return bool(groups.select(group="jax_plugins"))
    return bool(groups.get("jax_plugins"))
