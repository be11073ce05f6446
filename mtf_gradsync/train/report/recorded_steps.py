"""The steps of a run that were recorded: kept for the page, which later sessions write, too."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

from mtf_gradsync.runtimes.manifest import write_json
from mtf_gradsync.timelines import Table, TimelineError

TIMELINE_FILE = "timeline.json"


class RecordedSteps(NamedTuple):
    """Which steps were recorded, on which mesh, and where their time went."""

    first: int
    last: int
    mesh: str
    table: Table


def write_recorded(directory: Path, recorded: RecordedSteps) -> None:
    """Writes them to a run's directory. `Table.from_json` reads the file, too."""
    which = {"first": recorded.first, "last": recorded.last, "mesh": recorded.mesh}
    write_json(directory / TIMELINE_FILE, {**dataclasses.asdict(recorded.table), "recorded": which})


def read_recorded(directory: Path) -> RecordedSteps | None:
    """Returns what `write_recorded` wrote; None where nothing says which steps were recorded."""
    try:
        text = (directory / TIMELINE_FILE).read_text(encoding="utf-8")
        table, which = Table.from_json(text), json.loads(text)["recorded"]
        return RecordedSteps(
            int(which["first"]), int(which["last"]), str(which["mesh"]), table=table
        )
    except (OSError, TimelineError, ValueError, KeyError, TypeError):
        return None


def forget_recorded(directory: Path, step: int) -> None:
    """Removes the file where it is of steps after `step`, which the run makes once more."""
    recorded = read_recorded(directory)
    if recorded and recorded.last > step:
        (directory / TIMELINE_FILE).unlink()
