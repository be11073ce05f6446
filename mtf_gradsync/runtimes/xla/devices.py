"""The installed jax, and the devices that it has."""

from __future__ import annotations

import functools
import glob
import importlib.util
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Sequence

from mtf_gradsync.extension import check_whole_number, install_extra
from mtf_gradsync.runtimes._private.jax import backends_are_initialized
from mtf_gradsync.runtimes.processes.members import ProcessesError
from mtf_gradsync.runtimes.xla.runner.devices import find_devices, first_devices, make_cpu_devices

_OLDEST_JAX = "0.4.30"
# The newest version that was tested. A newer one is tried in a process of its own first.
_NEWEST_KNOWN_JAX = "0.12.0.1"
_TRIAL = str(Path(__file__).with_name("trial.py"))
_TRIAL_SECONDS = 120


class XlaMissingError(ImportError):
    """jax, or the TPU compiler, is not installed or too old."""


def why_no_xla() -> str:
    """Returns why programs cannot run on XLA devices here, and what would help.

    It is "" where they can.
    """
    return _reason("jax", "jaxlib")


def why_no_tpu_compiler() -> str:
    """Returns why programs cannot be compiled for a TPU here, and what would help.

    It is "" where they can.
    """
    return _reason("jax", "jaxlib", "libtpu")


def check_installed(*modules: str) -> None:
    """Raises an XlaMissingError that names the modules that are missing or too old."""
    reason = _reason(*modules)
    if reason:
        raise XlaMissingError(reason)


def _reason(*modules: str) -> str:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    extra = "tpu" if "libtpu" in modules else "xla"
    install = f"Install the extra: {install_extra(extra)}."
    if missing:
        return f"This needs {', '.join(missing)}, which is not installed. {install}"
    from importlib import metadata

    jax, jaxlib = metadata.version("jax"), metadata.version("jaxlib")
    if _numbers(jax) < _numbers(_OLDEST_JAX):
        return f"This needs jax {_OLDEST_JAX} or later; this is {jax}. {install}"
    if _numbers(jax) <= _numbers(_NEWEST_KNOWN_JAX) and _numbers(jax)[:3] == _numbers(jaxlib)[:3]:
        return ""
    return _why_unfit(jax, jaxlib)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"^[\d.]*", version)[0].strip(".").split("."))


@functools.lru_cache(maxsize=None)
def _why_unfit(jax: str, jaxlib: str) -> str:
    """Returns why a small program fails with untested versions; "" if it does not."""
    try:
        done = subprocess.run(
            [sys.executable, _TRIAL],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=_TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        problem = f"no end within {_TRIAL_SECONDS} s"
    else:
        if not done.returncode:
            return ""
        problem = _error_in(done.stderr) or f"exit code {done.returncode}"
    return (
        f"jax {jax} with jaxlib {jaxlib} does not run a small program as it should: {problem}. "
        f'Install a version that is known: pip install "jax<={_NEWEST_KNOWN_JAX}".'
    )


def _error_in(stderr: str) -> str:
    """Returns the error that ends a traceback, in one line without its details."""
    errors = re.findall(r"^[A-Za-z_][\w.]*: .*", stderr, re.MULTILINE)
    return errors[-1][:200].rstrip(".: ") if errors else ""


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
      ValueError: num_cores is not a whole number of 1 or more.
      XlaMissingError: when jax is not installed.
      DevicesError: when there is no such platform, or it has too few devices.
    """
    num_cores = check_whole_number("num_cores", num_cores)
    check_installed("jax", "jaxlib")
    if devices is not None:
        return first_devices(devices, num_cores)
    ask_for_cpu_devices(num_cores)
    leave_absent_tpus_alone()
    return find_devices(num_cores, platform)
