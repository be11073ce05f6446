"""Errors of a step, which say what went wrong and what to do."""

from __future__ import annotations

import contextlib
from typing import Iterator

_LONGEST = 600


class StepError(Exception):
    """A step lacks something that it needs; the message says what, and what to do."""


class DevicesError(StepError, RuntimeError):
    """jax has no devices for a step, or the step failed on them."""


@contextlib.contextmanager
def devices_errors(in_step: bool = True) -> Iterator[None]:
    """Turns XLA's errors in the block into `DevicesError`, with its message and what to do.

    With in_step=False, while a program is compiled, only errors about too little memory.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if type(error).__name__ not in ("XlaRuntimeError", "JaxRuntimeError"):
            raise
        # A step that failed may leave its devices unusable until the process ends.
        remedy = "Variables may be lost; go on from what was saved last in a new process."
        # Only the message shows which error it is. The second is a CPU device's in jaxlib 0.4.
        if any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "memory allocating")):
            raise DevicesError(
                f"The devices have no room for the step: {short(error)} Take a smaller batch, more "
                "microbatches, more devices, or devices with more memory; an exported step has to "
                f"be exported again for that.{' ' + remedy if in_step else ''}"
            ) from error
        if not in_step:
            raise
        raise DevicesError(f"The step failed on the devices: {short(error)} {remedy}") from error


def short(error: Exception) -> str:
    """Returns an error's message as one sentence on one line."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    return text if text.endswith((".", "!", "?")) else text + "."
