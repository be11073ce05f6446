"""What has to be installed for XLA."""

from __future__ import annotations

import importlib.util

_OLDEST_JAX = (0, 4, 30)
_EXTRAS = {"libtpu": "tpu"}


class XlaMissingError(ImportError):
    """jax, or the TPU compiler, is not installed or too old."""


def why_no_xla() -> str:
    """Why programs cannot run on XLA devices here.

    Returns:
      The reason with what would help, or "" where they can.
    """
    return _reason("jax", "jaxlib")


def why_no_tpu_compiler() -> str:
    """Why programs cannot be compiled for a TPU here.

    Returns:
      The reason with what would help, or "" where they can.
    """
    return _reason("jax", "jaxlib", "libtpu")


def check_installed(*modules: str) -> None:
    """Checks that modules can be imported, without importing them.

    Args:
      modules: their names.

    Raises:
      XlaMissingError: names those that are missing or too old.
    """
    reason = _reason(*modules)
    if reason:
        raise XlaMissingError(reason)


def _reason(*modules: str) -> str:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    extra = next((_EXTRAS[name] for name in modules if name in _EXTRAS), "xla")
    install = f'Install the extra: pip install "mtf-gradsync[{extra}]".'
    if missing:
        return f"This needs {', '.join(missing)}, which is not installed. {install}"
    from importlib import metadata

    version = metadata.version("jax")
    if tuple(int(part) for part in version.split(".")[:3]) < _OLDEST_JAX:
        oldest = ".".join(map(str, _OLDEST_JAX))
        return f"This needs jax {oldest} or later; this is {version}. {install}"
    return ""
