"""Errors that a user of the training program can act on."""

from __future__ import annotations

from mtf_gradsync.runtimes.errors import ConfigError, TrainingError, first_line

__all__ = ["ConfigError", "DataError", "TrainingError", "first_line"]


class DataError(TrainingError):
    """A training step has no batch, or one that the model cannot train on."""
