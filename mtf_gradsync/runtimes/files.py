"""Files that are there whole, or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def free_name(path: Path) -> Path:
    """Returns the path, or one like it that nothing has yet."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def write_text(path: Path, text: str) -> None:
    """Replaces a file in one step, so that a reader or a killed writer never leaves half of it."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file, as `write_text` does."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file, as `write_text` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
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
