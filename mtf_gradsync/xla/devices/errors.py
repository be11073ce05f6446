"""Says what went wrong on the devices, and what would do."""

from __future__ import annotations

import contextlib
from typing import Iterator

from mtf_gradsync.xla.devices.available import DevicesError

_LONGEST = 600


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turns XLA's errors in a step into `DevicesError`.

    Raises:
      DevicesError: says what XLA said, and what would do.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if type(error).__name__ not in ("XlaRuntimeError", "JaxRuntimeError"):
            raise
        text = " ".join(str(error).split())[:_LONGEST]
        # A step that failed may leave its devices unusable until the process ends.
        remedy = "Variables may be lost; go on from the newest checkpoint in a new process."
        if is_out_of_memory(text):
            remedy = "Take a smaller batch, more microbatches, or more devices. " + remedy
        raise DevicesError(f"The step failed on the devices: {text}. {remedy}") from error


def is_out_of_memory(text: str) -> bool:
    """Whether a message of XLA says that a device has no memory left, in any version's words."""
    return "RESOURCE_EXHAUSTED" in text or "memory allocating" in text
