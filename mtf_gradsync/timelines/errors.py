"""Errors of recordings."""

from __future__ import annotations


class TimelineError(RuntimeError):
    """Nothing can be said of where the time goes; the message says what to do."""
