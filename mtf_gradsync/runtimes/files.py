"""Writes files in one step, so that no reader ever sees half of one."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def free_name(path: Path) -> Path:
    """Returns the path, or a similar one if that exists."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def write_text(path: Path, text: str) -> None:
    """Replaces a text file in one step, even if the process is killed meanwhile."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces a JSON file in one step; see `write_text`."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces a file in one step; see `write_text`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        # /dev/null and pipes stay what they are.
        path.write_bytes(content)
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        # mkstemp makes private files; results are for everyone whom the directory is for.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
