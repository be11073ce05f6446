"""Errors of a run that its user can act on."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting of a run cannot work; the message names it and what would do.

    The command line prints the message without a traceback and exits with code 2.
    """


class TrainingError(RuntimeError):
    """A run that was set up correctly cannot go on, for example because its loss is not finite."""


def first_line(error: BaseException) -> str:
    """Returns an error's message in one line; its type where it has none."""
    # TensorFlow's sessions raise a second error, with many lines on where an operation was made.
    if type(error.__context__) is type(error):
        error = error.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


ACCEPT_FLAG = "--accept_checkpoint_differences"
SKIP_FLAG = "--skip_damaged_checkpoint"
