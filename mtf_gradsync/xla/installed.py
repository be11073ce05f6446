"""What has to be installed for compiling a SIMD program."""

from __future__ import annotations

import importlib.util

from mtf_gradsync.xla.lowering import check_tensorflow

_EXTRA = 'pip install "mtf-gradsync[train,tpu]" "tensorflow>=2.18", in an environment of its own'


class CompilerMissingError(ImportError):
    """The TPU compiler is not installed."""


def why_no_tpu_compiler() -> str:
    """Why programs cannot be compiled here.

    Returns:
      The reason with what would help, or "" where they can.
    """
    try:
        check_tensorflow()
        check_installed("jax", "jaxlib", "libtpu")
    except (RuntimeError, ImportError) as error:
        return str(error)
    return ""


def check_installed(*modules: str) -> None:
    """Checks that modules can be imported, without importing them.

    Args:
      modules: their names.

    Raises:
      CompilerMissingError: names those that are missing.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise CompilerMissingError(
            f"Compiling for a TPU needs {', '.join(missing)}, which is not installed. Install the "
            f"extra: {_EXTRA}."
        )
