"""Imports what a command works with, which takes seconds: the package, and with it TensorFlow."""

from __future__ import annotations

import importlib
import os
import sys

# TensorFlow's and XLA's C++ log from errors on (1: warnings, 2: errors, 3: what ends the process).
# Libraries that are looked for and absent are "errors" there; real ones raise exceptions, too.
_FATAL_ALONE = "3"


def import_package(verbosity: int) -> None:
    """Imports ``mtf_gradsync``, where the command has started without it.

    Args:
      verbosity: below 0, TensorFlow's C++ code logs what ends the process alone, unless the
        environment variable TF_CPP_MIN_LOG_LEVEL is set.
    """
    if verbosity < 0:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", _FATAL_ALONE)
    package = sys.modules["mtf_gradsync"]
    if not hasattr(package, "__all__"):
        importlib.reload(package)
