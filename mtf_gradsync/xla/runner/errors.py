"""Says what went wrong on the devices, and what would do."""

from __future__ import annotations

import contextlib
from typing import Iterator

_LONGEST = 600


class StepError(Exception):
    """What a step needs is missing; the message says what, and what would do."""


class DevicesError(StepError, RuntimeError):
    """jax has no devices for a step, or the step failed on them."""


@contextlib.contextmanager
def explained(in_step: bool = True) -> Iterator[None]:
    """Turns XLA's errors into `DevicesError`.

    Args:
      in_step: False while a program is compiled. What XLA says of it is then left as it is, but
        that it does not fit.

    Raises:
      DevicesError: says what XLA said, and what would do.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if type(error).__name__ not in ("XlaRuntimeError", "JaxRuntimeError"):
            raise
        # A step that failed may leave its devices unusable until the process ends.
        remedy = "Variables may be lost; go on from what was saved last in a new process."
        # jaxlib tells it in words alone. The second is what is left of a CPU device's in 0.4.
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
    """What an error says as one sentence on one line."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    return text if text.endswith((".", "!", "?")) else text + "."
