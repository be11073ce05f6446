"""Facts of a run that are known once its graph is built, kept for the page and later sessions."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import NamedTuple

from mtf_gradsync.runtimes.manifest import write_json
from mtf_gradsync.train.report.traffic import Traffic, TrafficRow

FACTS_FILE = "facts.json"

_LIBRARIES = ("mtf-gradsync", "tensorflow", "mesh-tensorflow", "jax", "numpy")


class Facts(NamedTuple):
    """What a run trained, and on what: the runtime of its newest steps, the versions of libraries.

    `optimizers` are class names, outermost first; `parameters` is the number of trainable ones;
    `traffic` is None where it could not be listed.
    """

    mesh: str
    layout: str
    runtime: str
    optimizers: list[str]
    parameters: int
    tokens_per_step: int
    versions: dict[str, str]
    traffic: Traffic | None


def versions() -> dict[str, str]:
    """Returns the versions of Python and of those libraries underneath that are installed."""
    found = {"Python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_facts(directory: Path, facts: Facts) -> None:
    """Writes facts to a run's directory."""
    content = facts._asdict()
    if facts.traffic is not None:
        rows = [row._asdict() for row in facts.traffic.rows]
        content["traffic"] = {**facts.traffic._asdict(), "rows": rows}
    write_json(directory / FACTS_FILE, content)


def read_facts(directory: Path) -> Facts | None:
    """Returns the facts that `write_facts` wrote; None if they are missing or of another form."""
    try:
        content = json.loads((directory / FACTS_FILE).read_text(encoding="utf-8"))
        traffic = content["traffic"]
        if traffic is not None:
            rows = [TrafficRow(**row) for row in traffic["rows"]]
            content["traffic"] = Traffic(**{**traffic, "rows": rows})
        return Facts(**content)
    except (OSError, ValueError, KeyError, TypeError):
        return None
