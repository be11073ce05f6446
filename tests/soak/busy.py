"""A busy machine: processes that take all cores for a while."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Iterator, NoReturn

from tests.soak.child import Child

# For each core: a program that shares it gets a third.
_EACH = 2


@contextlib.contextmanager
def busy_machine(directory: Path) -> Iterator[None]:
    """Takes all cores as long as it is entered.

    Args:
      directory: for what the processes print, which is nothing.
    """
    number = _EACH * len(os.sched_getaffinity(0))
    children = [Child(_work, directory / f"busy-{i}") for i in range(number)]
    try:
        yield
    finally:
        for child in children:
            child.kill()


def _work() -> NoReturn:
    while True:
        # Python code, and calls of the kernel.
        sum(range(100_000))
        time.sleep(0)
