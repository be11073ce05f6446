"""Imports the package, and with it TensorFlow, which takes seconds."""

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
    """Imports ``mtf_gradsync``, unless the command was started with it imported.

    With a verbosity below 0, and no lower TF_CPP_MIN_LOG_LEVEL in the environment, TensorFlow's C++
    code logs fatal errors only.
    """
    package = sys.modules["mtf_gradsync"]
    is_quiet = verbosity < 0 and os.environ.get(_LEVEL, _FATAL_ALONE) == _FATAL_ALONE
    if is_quiet:
        os.environ[_LEVEL] = _FATAL_ALONE
        # Mesh-TensorFlow's imports raise this warning.
        warnings.filterwarnings("ignore", "pkg_resources is deprecated")
    if not hasattr(package, "__all__"):
        with _without_lines_of_c() if is_quiet else contextlib.nullcontext():
            importlib.reload(package)


@contextlib.contextmanager
def _without_lines_of_c() -> Iterator[None]:
    """Hides what C++ code prints, which TensorFlow 2.17 and later do before a log level is set.

    If the block raises, what was hidden is printed; if it ends the process, Python says where.
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
