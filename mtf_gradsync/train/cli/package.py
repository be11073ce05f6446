"""Imports what a command works with, which takes seconds: the package, and with it TensorFlow."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import sys
import tempfile
import warnings
from typing import Iterator

# TensorFlow's and XLA's C++ log from here on (2: errors, 3: what ends the process). Libraries that
# are looked for and absent are "errors" there; real ones raise exceptions, too.
_FATAL_ALONE = "3"
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def import_package(verbosity: int) -> None:
    """Imports ``mtf_gradsync``, where the command has started without it.

    Args:
      verbosity: below 0, TensorFlow's C++ code logs what ends the process alone, and nothing while
        it is imported, unless the environment variable TF_CPP_MIN_LOG_LEVEL is set.
    """
    package = sys.modules["mtf_gradsync"]
    is_quiet = verbosity < 0 and _LEVEL not in os.environ
    if is_quiet:
        os.environ[_LEVEL] = _FATAL_ALONE
        # Of Mesh-TensorFlow's imports.
        warnings.filterwarnings("ignore", "pkg_resources is deprecated")
    if not hasattr(package, "__all__"):
        with _without_lines_of_c() if is_quiet else contextlib.nullcontext():
            importlib.reload(package)


@contextlib.contextmanager
def _without_lines_of_c() -> Iterator[None]:
    """Drops what C++ code prints: from TensorFlow 2.17 on, its log knows no level at first.

    Where the block fails, it is printed after all; where it ends the process, Python says where.
    """
    try:
        real = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    before, was_enabled = sys.stderr, faulthandler.is_enabled()
    with tempfile.TemporaryFile() as held:
        # Python's own lines go on to be seen. Not closed: logging's handlers may have kept it.
        sys.stderr = os.fdopen(os.dup(real), "w", buffering=1)
        faulthandler.enable(sys.stderr)
        os.dup2(held.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            os.dup2(real, 2)
            os.close(real)
            sys.stderr = before
            faulthandler.disable()
            if was_enabled:
                faulthandler.enable()
            if failed:
                held.seek(0)
                os.write(2, held.read())
