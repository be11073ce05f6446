"""Errors that a user of the training program can act on."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting of a run cannot work; the message names the gin binding and what would do.

    The command line prints the message without a traceback and exits with code 2.
    """


class TrainingError(RuntimeError):
    """A run that was set up correctly cannot go on, for example because its loss is not finite."""
