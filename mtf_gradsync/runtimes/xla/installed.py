"""Checks whether the installed jax and libtpu can be used; says what to install if not."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from mtf_gradsync.runtimes._common import install_extra

_OLDEST_JAX = "0.4.30"
# The newest version that was tested. A newer version is first tried in its own process.
_NEWEST_KNOWN_JAX = "0.12.0.1"
_TRIAL = str(Path(__file__).with_name("try_jax.py"))
_TRIAL_SECONDS = 120


class XlaMissingError(ImportError):
    """The error of jax or a TPU compiler that is missing or too old."""


def why_no_xla() -> str:
    """Returns why programs cannot run on XLA devices here, with a remedy; "" if they can."""
    return _reason("jax", "jaxlib")


def why_no_tpu_compiler() -> str:
    """Returns why programs cannot be compiled for a TPU here, with a remedy; "" if they can."""
    return _reason("jax", "jaxlib", "libtpu")


def check_installed(*modules: str) -> None:
    """Raises an XlaMissingError if one of `modules` is missing, or if jax is too old or too new.

    `modules` are names to import, such as "jax" and "libtpu".
    """
    reason = _reason(*modules)
    if reason:
        raise XlaMissingError(reason)


def _reason(*modules: str) -> str:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    extra = "tpu" if "libtpu" in modules else "xla"
    install = f"Install the extra: {install_extra(extra)}."
    if missing:
        return f"This needs {', '.join(missing)}, which is not installed. {install}"
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
    """Returns why a small program fails with these versions of jax; "" if it works.

    This function is called only for versions that are not known to work. `jax` and `jaxlib` are the
    versions' numbers.
    """
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
    """Returns the last line of a process's `stderr` that names an exception; "" if there is none.

    If the line has more than 200 characters, only the first 200 are returned.
    """
    errors = re.findall(r"^[A-Za-z_][\w.]*: .*", stderr, re.MULTILINE)
    return errors[-1][:200].rstrip(".: ") if errors else ""
