"""Warnings that are given once a process."""

from __future__ import annotations

import logging
from typing import Any

_logger = logging.getLogger("mtf_gradsync")
_warned: set[str] = set()


def warn_once(key: str, message: str, *args: Any) -> None:
    """Logs a warning the first time that its key is seen in this process."""
    if key not in _warned:
        _warned.add(key)
        _logger.warning(message, *args)


def reset_warnings() -> None:
    """Forgets which warnings were given, for tests."""
    _warned.clear()
