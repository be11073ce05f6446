"""Warnings and other lines that are logged once in a process."""

from __future__ import annotations

import logging
from typing import Any

_logger = logging.getLogger("mtf_gradsync")
_warned: set[str] = set()


def warn_once(key: str, message: str, *args: Any) -> None:
    """Logs a warning unless one with the same key was logged in this process."""
    log_once(key, logging.WARNING, message, *args)


def log_once(key: str, level: int, message: str, *args: Any) -> None:
    """Logs a line at a level of `logging`, as `warn_once` logs a warning."""
    if key not in _warned:
        _warned.add(key)
        _logger.log(level, message, *args)


def reset_warnings() -> None:
    """Forgets which warnings were logged, for tests."""
    _warned.clear()
