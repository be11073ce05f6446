"""The metrics file of a run, one line of JSON for each logged step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mtf_gradsync.runtimes.manifest import write_text


class MetricsFile:
    """Writes a JSON object per line: ``step`` and what was measured there."""

    def __init__(self, path: Path, first_step: int):
        """Opens the file, to append to the lines of the first_step steps that were made before.

        Lines of later steps are deleted: those steps, after a checkpoint, are made again.
        """
        self._path = path
        kept = [row for row in read_metrics(path) if row["step"] <= first_step]
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, step: int, **values: Any) -> None:
        """Appends a line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a metrics file, without one that a killed process left half written."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows
