"""The files in a run's directory: their names and content."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
from pathlib import Path
from typing import NamedTuple, Sequence

import gin

from mtf_gradsync.runtimes._common import CONFIG_FILE, write_json, write_text
from mtf_gradsync.tools.timelines import Table, TimelineError
from mtf_gradsync.tools.train.traffic import Traffic, TrafficRow

METRICS_FILE = "metrics.jsonl"
RESULT_FILE = "result.json"
SAMPLES_FILE = "samples.txt"
FACTS_FILE = "facts.json"
REPORT_FILE = "report.html"
TIMELINE_FILE = "timeline.json"
TRACE_FILE = "timeline.trace.json.gz"
BEST_DIR = "best"


def write_config(directory: Path) -> None:
    """Writes the values of all gin parameters that were read up to now to a run's directory."""
    write_text(directory / CONFIG_FILE, gin.operative_config_str())


_LIBRARIES = ("mtf-gradsync", "tensorflow", "mesh-tensorflow", "jax", "numpy")


class RunFacts(NamedTuple):
    """The facts of a run: its model and data, the runtime of its newest steps, and versions.

    `optimizers` are the class names of the run's optimizers, the outermost first. `parameters` is
    the number of trainable parameters. `traffic` has the bytes that a training step exchanges, or
    is None if they are not known. `first_examples` are hashes of the first examples of the data
    set, [] if they are not known.
    """

    mesh: str
    layout: str
    runtime: str
    optimizers: list[str]
    parameters: int
    tokens_per_step: int
    versions: dict[str, str]
    traffic: Traffic | None
    first_examples: Sequence[str] = ()


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed libraries that a run uses, by name."""
    found = {"Python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_facts(directory: Path, facts: RunFacts) -> None:
    """Writes `facts` about a run (its model, data, runtime and versions) to the run's directory."""
    content = facts._asdict()
    if facts.traffic is not None:
        rows = [row._asdict() for row in facts.traffic.rows]
        content["traffic"] = {**facts.traffic._asdict(), "rows": rows}
    write_json(directory / FACTS_FILE, content)


def read_facts(directory: Path) -> RunFacts | None:
    """Returns the facts about a run that `write_facts` has written to its directory.

    The result is None if there is no file of facts, or if the file cannot be read as `RunFacts`.
    """
    try:
        content = json.loads((directory / FACTS_FILE).read_text(encoding="utf-8"))
        traffic = content["traffic"]
        if traffic is not None:
            rows = [TrafficRow(**row) for row in traffic["rows"]]
            content["traffic"] = Traffic(**{**traffic, "rows": rows})
        content["first_examples"] = tuple(content.get("first_examples", ()))
        return RunFacts(**content)
    except (OSError, ValueError, KeyError, TypeError):
        return None


class RecordedSteps(NamedTuple):
    """The timeline of the steps `first` to `last` on `mesh`: `table` says where time went."""

    first: int
    last: int
    mesh: str
    table: Table


def write_recorded_steps(directory: Path, recorded: RecordedSteps) -> None:
    """Writes a timeline to a run's directory; `Table.from_json` can read the file, too."""
    which = {"first": recorded.first, "last": recorded.last, "mesh": recorded.mesh}
    write_json(directory / TIMELINE_FILE, {**dataclasses.asdict(recorded.table), "recorded": which})


def read_recorded_steps(directory: Path) -> RecordedSteps | None:
    """Returns the timeline that a run has left in its directory; None if there is none."""
    try:
        text = (directory / TIMELINE_FILE).read_text(encoding="utf-8")
        table, which = Table.from_json(text), json.loads(text)["recorded"]
        return RecordedSteps(
            int(which["first"]), int(which["last"]), str(which["mesh"]), table=table
        )
    except (OSError, TimelineError, ValueError, KeyError, TypeError):
        return None


def remove_later_recorded(directory: Path, step: int) -> None:
    """Removes the timeline in a run's directory if it has steps after `step`.

    The run goes on from `step` and makes these steps again. If `directory` has no timeline, or a
    timeline that ends at `step` or before, nothing is removed.
    """
    recorded = read_recorded_steps(directory)
    if recorded and recorded.last > step:
        (directory / TIMELINE_FILE).unlink()


def keep_best(path: str, directory: Path) -> None:
    """Copies the checkpoint `path` to `BEST_DIR` in a run's directory, in place of the one there.

    The copies are hard links if the file system has hard links. The file "checkpoint" in `BEST_DIR`
    names the new checkpoint before the old checkpoint is removed.
    """
    best = directory / BEST_DIR
    best.mkdir(exist_ok=True)
    source, before = Path(path), set(best.iterdir())
    for file in source.parent.glob(f"{source.name}.*"):
        kept = best / file.name
        kept.unlink(missing_ok=True)
        try:
            os.link(file, kept)
        except OSError:
            shutil.copy2(file, kept)
        before.discard(kept)
    state = best / "checkpoint"
    write_text(state, f'model_checkpoint_path: "{source.name}"\n')
    for file in before - {state}:
        file.unlink()
