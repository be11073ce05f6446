"""Writes the page ``report.html``: one file that loads nothing else."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import platform
import re
from pathlib import Path
from typing import Any, NamedTuple, Sequence

from mtf_gradsync.runtimes.starting import write_json, write_text
from mtf_gradsync.tools.islands.journal import Status
from mtf_gradsync.tools.timelines import Table, TimelineError
from mtf_gradsync.tools.train import plots
from mtf_gradsync.tools.train.figures import check_library
from mtf_gradsync.tools.train.plots import series_of, training_losses
from mtf_gradsync.tools.train.train_graph import Traffic, TrafficRow

FACTS_FILE = "facts.json"

_LIBRARIES = ("mtf-gradsync", "tensorflow", "mesh-tensorflow", "jax", "numpy")


class Facts(NamedTuple):
    """What a run trained, and on what: the runtime of its newest steps, the versions of libraries.

    `optimizers` are class names, outermost first; `parameters` is the number of trainable ones;
    `traffic` is None where it could not be listed; `first_examples` are hashes of the first
    examples of its data set, none where they are not known.
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
        content["first_examples"] = tuple(content.get("first_examples", ()))
        return Facts(**content)
    except (OSError, ValueError, KeyError, TypeError):
        return None


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


REPORT_FILE = "report.html"

# Characters that HTML does not allow in text, or that would reverse the text after them.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff\u202a-\u202e\u2066-\u2069]"
)


class Ended(NamedTuple):
    """How a run ended, and after which step of the train_steps that it was to make.

    `how` is "finished", or says why it ended before; `result` is the content of the result file,
    empty for a run that ended early.
    """

    step: int
    train_steps: int
    how: str
    result: dict[str, Any]


def check_pages_installed() -> None:
    """Raises a ConfigError if a library is missing that pages need; called before a run begins."""
    check_library("jinja2", f"writing {REPORT_FILE}")
    check_library("matplotlib", "drawing pictures")


def write_page(
    directory: Path,
    rows: Sequence[dict[str, Any]],
    ended: Ended,
    facts: Facts | None,
    unigram_nats: float | None = None,
    samples: str = "",
    config: str = "",
    recorded: RecordedSteps | None = None,
    islands: Status | None = None,
) -> Path:
    """Writes the page of a run to its directory, from the `rows` of its metrics file.

    `facts` are None for a run that ended before its graph was built; unigram_nats are the
    baseline's nats per token, `samples` what the model wrote, `config` gin's text, `recorded` the
    steps of which there is a timeline, by this session of the run or an earlier one; `islands` the
    journal of the folder of a run that is an island.
    """
    check_pages_installed()
    import jinja2
    import markupsafe

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["kB"] = plots.kilobytes
    template = Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8")

    def as_markup(plot: plots.Plot) -> plots.Plot:
        # The only text that is not escaped here: matplotlib has escaped it.
        return plot._replace(svg=markupsafe.Markup(plot.svg), wide=markupsafe.Markup(plot.wide))

    traffic = facts.traffic if facts else None
    bars = plots.draw_traffic(traffic) if traffic else None
    rows_of_islands = plots.draw_islands(islands) if islands else None
    text = environment.from_string(template).render(
        name=printable(directory.resolve().name),
        ended=ended._replace(how=printable(ended.how)),
        tiles=_tiles(rows, ended, facts),
        plots=[
            as_markup(plot)
            for plot in (*plots.draw_plots(rows, unigram_nats), rows_of_islands)
            if plot
        ],
        replicas=_replicas(rows),
        traffic=traffic,
        bars=as_markup(bars) if bars else None,
        recorded=recorded._replace(mesh=printable(recorded.mesh)) if recorded else None,
        timeline=recorded.table if recorded else None,
        mesh_now=printable(facts.mesh) if facts else None,
        facts=_facts(facts),
        samples=printable(samples),
        config=printable(config),
        written=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )
    path = directory / REPORT_FILE
    write_text(path, text)
    return path


def printable(text: str) -> str:
    """Returns a text with a replacement character for each one that a page may not have."""
    return _UNPRINTABLE.sub("\ufffd", text.replace("\r\n", "\n"))


def _tiles(
    rows: Sequence[dict[str, Any]], ended: Ended, facts: Facts | None
) -> list[tuple[str, str, str]]:
    """Returns the main numbers: for each a title, the number as text, and a remark."""
    result = ended.result
    tiles = []
    loss = training_losses(rows)
    if loss:
        remark = f"nats per token, at step {loss.steps[-1]:,}"
        tiles.append(("training loss", f"{loss.last:.3f}", remark))
    if "held_out" in result:
        for name, title in (("held_out", "held-out loss"), ("unigram", "unigram baseline")):
            score = result[name]
            remark = f"nats per token: perplexity {score['perplexity']:.3f}"
            if name == "held_out":
                remark += f", {score['bits_per_byte']:.3f} bits per byte"
            tiles.append((title, f"{score['nats_per_token']:.3f}", remark))
    else:
        points = series_of(rows, "held_out_nats")
        if points:
            remark = f"nats per token, at step {points.steps[-1]:,}"
            tiles.append(("held-out loss", f"{points.last:.3f}", remark))
    speed = series_of(rows, "tokens_per_second")
    if "tokens_per_second" in result:
        remark = f"over {result['seconds']:,.0f} s of training"
        tiles.append(("tokens per second", f"{result['tokens_per_second']:,.0f}", remark))
    elif speed:
        tiles.append(("tokens per second", f"{speed.last:,.0f}", "at the end"))
    if facts:
        tiles.append(("parameters", f"{facts.parameters:,}", "trained"))
        traffic = facts.traffic
        if traffic and traffic.is_complete:
            tiles.append(
                (
                    "kB across the mesh",
                    plots.kilobytes(traffic.update_step),
                    "a core, in an update step",
                )
            )
    return tiles


def _replicas(rows: Sequence[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Returns for each replica its number, its contributions, and the steps without one."""
    made = series_of(rows, "sync_replicas/contributions")
    dropped = series_of(rows, "sync_replicas/dropped")
    if made is None or dropped is None or made.values.ndim != 2:
        return []
    pairs = zip(made.last, dropped.last)
    return [(number, int(m), int(d)) for number, (m, d) in enumerate(pairs)]


def _facts(facts: Facts | None) -> list[tuple[str, str]]:
    if facts is None:
        return []
    shown = [
        ("mesh", facts.mesh),
        ("layout", facts.layout),
        ("runtime", facts.runtime),
        ("optimizers", " around ".join(facts.optimizers)),
        ("parameters", f"{facts.parameters:,}"),
        ("tokens per step", f"{facts.tokens_per_step:,}"),
        *facts.versions.items(),
    ]
    return [(name, printable(str(value))) for name, value in shown]
