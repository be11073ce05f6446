"""Writes the files of commands, and reports what keeps them from being written."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
from pathlib import Path
from typing import Any, Iterator

from mtf_gradsync.runtimes.manifest import write_bytes
from mtf_gradsync.train.errors import ConfigError, TrainingError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


@contextlib.contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Turns an OSError of the block into a TrainingError that says what to do about it."""
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


def check_installed(library: str, work: str) -> None:
    """Raises a ConfigError if a library of the train extra is missing, without importing it."""
    if importlib.util.find_spec(library) is None:
        raise ConfigError(f'{work} needs {library}: pip install "mtf-gradsync[train]"')


def check_drawing() -> None:
    """Raises a ConfigError if pictures cannot be drawn, after importing what draws them."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            f'Drawing pictures needs matplotlib ({error}): pip install "mtf-gradsync[train]"'
        ) from error


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure, sized in inches; raises a ConfigError without matplotlib."""
    check_drawing()
    # Not pyplot: its state would outlive the call, and its backend is the program's choice.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(path: Path, figure: Any) -> None:
    """Writes a figure as a PNG file in one step."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    write_bytes(path, content.getvalue())
