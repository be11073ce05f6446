"""Writes the page ``report.html``: one file that loads nothing else."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any, NamedTuple, Sequence

from mtf_gradsync.runtimes._common import write_text
from mtf_gradsync.tools.islands.journal import Status
from mtf_gradsync.tools.train import plots
from mtf_gradsync.tools.train.figures import check_library
from mtf_gradsync.tools.train.plots import series_of, training_losses
from mtf_gradsync.tools.train.run_files import REPORT_FILE, RecordedSteps, RunFacts

# Characters that HTML does not allow in text, or that would reverse the text after them.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff\u202a-\u202e\u2066-\u2069]"
)


class Ended(NamedTuple):
    """The end of a run: its last step, the train_steps it was to make, and how it ended.

    `how` is "finished", or a text that says why the run ended early. `result` is the content of the
    run's result file; it is empty for a run that ended early.
    """

    step: int
    train_steps: int
    how: str
    result: dict[str, Any]


def check_pages_installed() -> None:
    """Raises a ConfigError if a library that pages need is missing.

    A run calls `check_pages_installed` at its beginning. So a missing library does not stop the run
    at its end, when the page is written.
    """
    check_library("jinja2", f"writing {REPORT_FILE}")
    check_library("matplotlib", "drawing pictures")


def write_page(
    directory: Path,
    rows: Sequence[dict[str, Any]],
    ended: Ended,
    facts: RunFacts | None,
    unigram_nats: float | None = None,
    samples: str = "",
    config: str = "",
    recorded: RecordedSteps | None = None,
    islands: Status | None = None,
) -> Path:
    """Writes the page of a run to its directory, and returns the page's path.

    Args:
      directory: the run's directory.
      rows: the lines of the metrics file.
      ended: how the run ended.
      facts: the run's model, runtime and versions; None if the run ended before its graph was
        built.
      unigram_nats: the loss of the unigram baseline (a model that knows only how often each token
        occurs), in nats per token; None if it was not computed.
      samples: what the model wrote.
      config: the text of gin's configuration.
      recorded: the timeline of some steps, from this session of the run or an earlier one; None if
        there is no timeline.
      islands: the status of the folder of islands; None if the run is no island.
    """
    check_pages_installed()
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        finalize=_printable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kB"] = plots.kilobytes
    template = Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8")
    traffic = facts.traffic if facts else None
    rows_of_islands = plots.draw_islands(islands) if islands else None
    text = environment.from_string(template).render(
        name=directory.resolve().name,
        ended=ended,
        tiles=_main_numbers(rows, ended, facts),
        plots=list(filter(None, (*plots.draw_plots(rows, unigram_nats), rows_of_islands))),
        replicas=_contributions_by_replica(rows),
        traffic=traffic,
        bars=plots.draw_traffic(traffic) if traffic else None,
        recorded=recorded,
        timeline=recorded.table if recorded else None,
        mesh_now=facts.mesh if facts else None,
        facts=_facts(facts),
        samples=samples,
        config=config,
        written=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )
    path = directory / REPORT_FILE
    write_text(path, text)
    return path


def _printable(value: Any) -> Any:
    """Replaces characters that a page may not have by U+FFFD, if `value` is text and no markup."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return _UNPRINTABLE.sub("\ufffd", value.replace("\r\n", "\n")) if is_text else value


def _main_numbers(
    rows: Sequence[dict[str, Any]], ended: Ended, facts: RunFacts | None
) -> list[tuple[str, str, str]]:
    """Returns the numbers at the top of a run's page: for each a title, its text, and a remark.

    `rows` are the lines of the metrics file, `ended` says how the run ended, and `facts` are about
    its model and runtime. Numbers that are not known are left out.
    """
    result = ended.result
    measured = {"training loss": training_losses(rows)}
    if "held_out" not in result:
        measured["held-out loss"] = series_of(rows, "held_out_nats")
    tiles = [
        (title, f"{points.last:.3f}", f"nats per token, at step {points.steps[-1]:,}")
        for title, points in measured.items()
        if points
    ]
    if "held_out" in result:
        for name, title in (("held_out", "held-out loss"), ("unigram", "unigram baseline")):
            score = result[name]
            remark = f"nats per token: perplexity {score['perplexity']:.3f}"
            if name == "held_out":
                remark += f", {score['bits_per_byte']:.3f} bits per byte"
            tiles.append((title, f"{score['nats_per_token']:.3f}", remark))
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
            size = plots.kilobytes(traffic.update_step)
            tiles.append(("kB across the mesh", size, "a core, in an update step"))
    return tiles


def _contributions_by_replica(rows: Sequence[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Returns for each replica its number, its contributions, and its steps without one.

    A replica's contribution is its part of the gradients of one step. `rows` are the lines of the
    metrics file. The result is empty if the optimizers do not count contributions.
    """
    made = series_of(rows, "sync_replicas/contributions")
    dropped = series_of(rows, "sync_replicas/dropped")
    if made is None or dropped is None or made.values.ndim != 2:
        return []
    pairs = zip(made.last, dropped.last)
    return [(number, int(m), int(d)) for number, (m, d) in enumerate(pairs)]


def _facts(facts: RunFacts | None) -> list[tuple[str, str]]:
    if facts is None:
        return []
    return [
        ("mesh", facts.mesh),
        ("layout", facts.layout),
        ("runtime", facts.runtime),
        ("optimizers", " around ".join(facts.optimizers)),
        ("parameters", f"{facts.parameters:,}"),
        ("tokens per step", f"{facts.tokens_per_step:,}"),
        *facts.versions.items(),
    ]
