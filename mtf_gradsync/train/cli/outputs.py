"""Checks and reports files that a command is to write."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Iterator, Mapping

from mtf_gradsync.runtimes.errors import ConfigError, TrainingError


def output_path(flag: str, name: str | None) -> Path | None:
    """Returns the path of a file to write, None for no name; raises if it cannot be written."""
    if not name:
        return None
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{flag}={name} cannot be written: {path.parent} must be a directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag}={name} cannot be written: permission denied")
    return path


def output_paths(names: Mapping[str, str | None]) -> list[Path | None]:
    """Returns the `output_path` of each flag; raises if two flags name the same file."""
    paths = {flag: output_path(flag, name) for flag, name in names.items()}
    flags: dict[Path, str] = {}
    for flag, path in paths.items():
        # A device takes all that is written to it.
        if path is not None and (path.is_file() or not path.exists()):
            other = flags.setdefault(path.resolve(), flag)
            if other != flag:
                raise ConfigError(f"{other} and {flag} name the same file: {path}")
    return list(paths.values())


def make_output_folder(flag: str, name: str | None) -> None:
    """Makes a folder to write files to, unless no name is given; raises if it cannot be made."""
    if not name:
        return
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag}={name} cannot be made: {error.strerror or error}") from error
    if not os.access(name, os.W_OK):
        raise ConfigError(f"{flag}={name} cannot be written to: permission denied")


@contextlib.contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Turns an OSError of the block, of a full disk say, into a TrainingError with the flag."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise TrainingError(f"{flag}={path} cannot be written: {reason}") from error
