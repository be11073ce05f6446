"""Turns errors of libraries and of other packages into errors of a run, with their texts."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Iterator

from mtf_gradsync.runtimes._common import TrainingError


@contextlib.contextmanager
def raised_as(
    kind: type[Exception], *errors: type[BaseException], before: str = ""
) -> Iterator[None]:
    """Turns exceptions of the types `errors` that the block raises into exceptions of type `kind`.

    The new exception has the same text, with the text `before` in front.
    """
    try:
        yield
    except errors as error:
        raise kind(f"{before}{error}") from error


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


@contextlib.contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Turns an OSError of the block into a TrainingError that says what to do about it.

    `directory` is the folder of the run, whose files the block writes.
    """
    try:
        yield
    except BrokenPipeError:  # raised when the reader of the output has gone
        raise
    except OSError as error:
        first = error
        # Gin re-raises errors as copies, which have neither number nor file.
        while first.errno is None and isinstance(first.__context__, OSError):
            first = first.__context__
        name = Path(first.filename).absolute() if first.filename else directory.absolute()
        is_here = directory.absolute() in (name, *name.parents)
        if first.errno not in _NO_ROOM and not is_here:
            # A function of the config raised it, while it read its data or used the network.
            raise TrainingError(f"{type(error).__name__}: {error}") from error
        raise TrainingError(
            f"{first.filename or directory} cannot be written: {first.strerror or first}. The "
            f"checkpoints in {directory} are as they were; once it can be written to, the same "
            "command goes on from the newest."
        ) from error
