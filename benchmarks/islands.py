"""Islands that die, lag, come back and are added: goodput, loss, and whether a version is lost."""

from __future__ import annotations

import collections
import contextlib
import json
import multiprocessing
import sys
import tempfile
import threading
import types
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import numpy as np

from benchmarks import less_communication, models, report, timing
from benchmarks.islands_series import (
    FAULTS,
    ISLANDS,
    LENGTH,
    TOKENS,
    Scale,
    Series,
    language_model,
    merger_of,
    numbers_of,
    program,
    rounds_of,
    run,
)
from mtf_gradsync import islands
from mtf_gradsync.tools.islands.objects import numbers_in, parsed_contribution
from mtf_gradsync.tools.islands.tensor_files import TensorSpec
from mtf_gradsync.tools.islands.versions import read_version

SETTINGS = {"steps": 160, "step_seconds": 0.3, "down_seconds": 3.0, "kills": 60, "faults": 60}
ONE, NONE = "one program", "islands"
CLOSING = "closing"  # an island that learns nothing, by which what came late is named
SERIES = [
    Series(ONE, is_one=True),
    Series(f"{ONE}, 1 in 100", kill=0.01, is_one=True),
    Series(f"{ONE}, 1 in 20", kill=0.05, is_one=True),
    Series(NONE),
    Series(f"{NONE}, another seed", seed=1),
    Series(f"{NONE}, 1 in 100", kill=0.01),
    Series(f"{NONE}, 1 in 20", kill=0.05),
    Series(f"{NONE}, one 3 times slower", slow=3.0),
    Series(f"{NONE}, merger killed", merger_seconds=3.0),
    Series(f"{NONE}, one added", is_added=True),
]
# What counts as held-out loss at the end: the mean of the last versions, which differ by chance.
LAST, POINTS = 3, 12
GOODPUT, NATS = 0.9, 0.02


class Trained(NamedTuple):
    """What a series has come to.

    Attributes:
      points: tokens, seconds and what `Losses` takes, of each version or round.
      full: tokens that all islands would make in the time, if none died or was slow.
      could: tokens that those could make that were there, each as fast as it is.
      made: tokens of the steps that they made.
      useful: tokens that are in the last version.
      seconds: until it was there.
      kills: of islands and of the merger.
      versions: how many.
      bad: versions with other bits than their contributions make, or lost.
      late: contributions that came too late.
    """

    points: list[tuple[float, float, Any]]
    full: float
    could: float
    made: float
    useful: float
    seconds: float
    kills: tuple[int, int]
    versions: int
    bad: int
    late: int


def measure(options: report.Options) -> report.Table:
    """Trains each series, reads what has become of it, and asks for the loss on held-out text."""
    settings = {**SETTINGS, **options.settings}
    steps = 20 if options.quick else int(settings["steps"])
    seconds = float(settings["step_seconds"])
    scale = Scale(steps, seconds, float(settings["down_seconds"]), 20.0 + 3.0 * steps * seconds)
    names = options.only.get("series", available())
    chosen = [one for one in SERIES if one.name in names]
    if options.quick:
        chosen = [one for one in chosen if one.name in (NONE, f"{NONE}, 1 in 20")] or chosen[:1]
    with tempfile.TemporaryDirectory() as directory:
        places = _run(chosen, scale, Path(directory))
        found = {
            one: (_program_trained if one.is_one else _islands_trained)(one, scale, place)
            for one, place in places.items()
        }
        with _losses() as losses:
            curves = {one.name: _curve(trained, losses) for one, trained in found.items()}
    rows = [_row(one, scale, trained, curves) for one, trained in found.items()]
    return report.Table(
        name="islands",
        title=f"{ISLANDS} islands of a byte-level language model, {steps} steps of each island",
        rows=rows,
        notes=_notes(scale),
        targets=[] if options.quick else list(_targets(rows)),
        plot=lambda axes: _plot(axes, curves, rows),
    )


def measure_kills(options: report.Options) -> report.Table:
    """Kills islands and the merger many times while their folder fails, and asks what is lost."""
    settings = {**SETTINGS, **options.settings}
    kills, faults = (5 if options.quick else int(settings[x]) for x in ("kills", "faults"))
    scale = Scale(1_000_000, 0.05, 0.3, 300.0)
    series = Series("all killed", kill=0.02, merger_seconds=2.0, kills=kills, faults=faults)
    with tempfile.TemporaryDirectory() as directory:
        (place,) = _run([series], scale, Path(directory)).values()
        _end_numbers(place, series, scale)
        trained = _islands_trained(series, scale, place)
        folder = islands.Folder(place / "folder")
        status = islands.read_status(folder)
        record = json.loads((place / "record.json").read_text("utf-8"))
        steps = _accounted(folder, status, record["lives"])
    row: report.Row = {
        "islands killed": trained.kills[0],
        "mergers killed": trained.kills[1],
        "faults": sum(record["faults"].values()),
        "versions": trained.versions,
        "contributions merged": sum(one.merged for one in status.rows),
        "late": trained.late,
        "refused": sum(one.refused for one in status.rows),
        **steps,
        "wrong or lost": trained.bad,
    }
    bad = trained.bad + int(steps["unaccounted"])
    happened = f"{sum(trained.kills)} kills and {row['faults']} faults"
    return report.Table(
        name="islands_kills",
        title=f"Kills of {ISLANDS} islands and their merger while requests to their folder fail",
        rows=[row],
        notes=(
            "These islands train no model: their variables are numbers that change at random. A"
            " step takes 0.05 s, islands exchange values every 10 steps, and write a checkpoint"
            " after each step.",
            "During a fault, which lasts half a second, half of the requests to the folder fail."
            f" The kinds of faults are {', '.join(FAULTS)}.",
            '"steps" counts the steps of all islands. "killed" counts the steps that were in no'
            " checkpoint when their island was killed, at most one step for each kill."
            ' "unaccounted" counts all other steps that are in no version, or in two versions.',
            '"wrong or lost" counts versions without a decision or with other bits than --replay'
            " makes, and contributions that are in two versions, or that were neither merged nor"
            " dropped nor refused.",
        ),
        targets=[report.Target(f"wrong, lost or unaccounted in {happened}", bad, 0, "")],
    )


def _end_numbers(place: Path, series: Series, scale: Scale) -> None:
    """Begins the last life of each island of numbers, which contributes all that is left."""
    with _merging(place, series, scale):
        for number in range(ISLANDS):
            made, session, _, _ = numbers_of(place, number, series, scale.step_seconds)
            made.finish(session)


@contextlib.contextmanager
def _merging(place: Path, series: Series, scale: Scale) -> Iterator[None]:
    merger, stop = merger_of(place / "folder", series.inner_steps * scale.step_seconds), []
    thread = threading.Thread(target=merger.run, args=(lambda: bool(stop),))
    thread.start()
    try:
        yield
    finally:
        stop.append(True)
        thread.join()


def _accounted(folder: islands.Folder, status: islands.Status, lives: Any) -> dict[str, float]:
    """Counts the steps that islands made, lost with a kill, and that are not accounted for.

    One of the numbers of a change is how many steps are in it.
    """
    merged: collections.Counter[str] = collections.Counter()
    for one in (c for decision in status.decisions[1:] for c in decision.contributions):
        found = folder.load(one.object)
        steps = float(found.tensors["b"]) if found and "b" in found.tensors else 0.0
        merged[one.island] += one.steps
        if abs(steps - one.steps) > 1e-2 and one.island != CLOSING:
            merged[one.island] += 10**6  # it is of other steps than it says
    made, killed, unaccounted = 0.0, 0.0, 0.0
    for number in range(ISLANDS):
        own = [life for life in lives if life["name"] == str(number)]
        steps, kept = (sum(life[what] for life in own) for what in ("steps", "kept"))
        found = merged[f"island-{number}"]
        unaccounted += max(kept - found, 0.0) + max(found - steps, 0.0)
        made, killed = made + steps, killed + max(steps - found, 0.0)
    return {"steps": made, "killed": killed, "unaccounted": unaccounted}


def _run(chosen: Sequence[Series], scale: Scale, directory: Path) -> dict[Series, Path]:
    """Runs series one after the other; returns the directories of what they leave."""
    places = {}
    # A process of its own: this one may have threads, and those must not be forked.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as worker:
        for number, one in enumerate(timing.progress(chosen, "series")):
            places[one] = directory / str(number)
            worker.submit(run, one, scale, str(places[one])).result()
    return places


def available() -> list[str]:
    """Names of the series."""
    return [one.name for one in SERIES]


def _islands_trained(series: Series, scale: Scale, place: Path) -> Trained:
    """Reads the folder of a series; a version is replayed from its contributions."""
    folder = islands.Folder(place / "folder")
    _merge_once_more(place, series, scale)
    record = json.loads((place / "record.json").read_text("utf-8"))
    status = islands.read_status(folder)
    points, tokens = [], 0.0
    for decision in status.decisions[1:]:
        if tokens < scale.tokens:
            tokens += sum(c.weight for c in decision.contributions)
            name = f"versions/{decision.version:08d}.safetensors"
            points.append((tokens, decision.time - record["began"], (folder, name)))
    return _trained(
        series, scale, record, points, tokens,
        versions=len(status.decisions), bad=_bad_versions(folder, status),
        late=sum(len(d.dropped) for d in status.decisions),
    )  # fmt: skip


def _merge_once_more(place: Path, series: Series, scale: Scale) -> None:
    """Has the merger make what it has decided on, and a version that names all that came late."""
    with _merging(place, series, scale):
        folder = islands.Folder(place / "folder")
        version = max(numbers_in(folder, "versions", ".safetensors"))
        values, _ = read_version(folder, version, 1)

        still = types.SimpleNamespace(
            specs={name: TensorSpec.of(value) for name, value in values.items()},
            read=dict, write=dict.update,
        )  # fmt: skip
        made = islands.Island(str(place / "folder"), CLOSING, 1, values=still, follow="own")
        session = dict(values)
        made.begin(session)
        made.after_step(session, 1e-6)
        made.finish(session)


def _bad_versions(folder: islands.Folder, status: islands.Status) -> int:
    """Counts versions that are wrong or missing, and contributions merged twice or lost."""
    wrong = len(islands.replay(folder))
    lost = sum(d.version != number for number, d in enumerate(status.decisions))
    used = [c.object for d in status.decisions for c in (*d.contributions, *d.dropped)]
    twice = len(used) - len(set(used))
    merged = [c.pair for d in status.decisions[1:] for c in d.contributions]
    twice += len(merged) - len(set(merged))
    # Of several to one version, those before the last one are in it.
    pairs = {parsed_contribution(name)[:2] for name in used if parsed_contribution(name)}
    refused = {name for d in status.decisions for name in d.refused}
    there = [
        parsed
        for version in folder.names("contributions")
        for name in folder.names(f"contributions/{version}")
        if (parsed := parsed_contribution(f"contributions/{version}/{name}"))
        and f"contributions/{version}/{name}" not in refused
    ]
    return wrong + lost + twice + len({parsed[:2] for parsed in there} - pairs)


def _program_trained(series: Series, scale: Scale, place: Path) -> Trained:
    record = json.loads((place / "record.json").read_text("utf-8"))
    rounds = rounds_of(place)
    points = [
        (one["step"] * ISLANDS * TOKENS, one["time"] - record["began"], one["path"])
        for one in rounds
    ]
    useful = points[-1][0] if points else 0.0
    return _trained(series, scale, record, points, useful, versions=len(rounds), bad=0, late=0)


def _trained(
    series: Series, scale: Scale, record: Any, points: Any, useful: float, **more: int
) -> Trained:
    at_once = ISLANDS if series.is_one else 1  # islands that a process trains
    is_whole = useful >= scale.tokens
    end = points[-1][1] if is_whole else max(x["end"] for x in record["lives"]) - record["began"]
    could = made = 0.0
    for life in record["lives"]:
        lived = min(life["end"] - record["began"], end) - (life["ready"] - record["began"])
        share = max(lived, 0.0) / (life["end"] - life["ready"])
        could += max(lived, 0.0) / life["step_seconds"] * TOKENS * at_once
        made += life["steps"] * share * TOKENS * at_once
    full = end / scale.step_seconds * ISLANDS * TOKENS
    kills = record["kills"], record["merger_kills"]
    return Trained(points, full, could, made, useful, end, kills, **more)


@contextlib.contextmanager
def _losses() -> Iterator[Callable[[Any], float]]:
    """A function of values, or of a checkpoint's path: the loss on held-out text."""
    made, built = program(language_model(1, 64), models.FLOOR, 0)
    rng = np.random.RandomState(5)
    asked = [less_communication.batch_of("validation", (64, LENGTH), rng) for _ in range(8)]
    with built.graph.as_default(), made.session(built.lowering) as session:

        def loss(values: Any) -> float:
            if isinstance(values, str):
                session.restore(values)
            else:
                folder, name = values
                session.write(folder.load(name).tensors)
            return float(np.mean([session.run(built.loss, {built.x: x}) for x in asked]))

        yield loss


def _curve(trained: Trained, losses: Callable[[Any], float]) -> list[tuple[float, float, float]]:
    """Tokens, seconds and loss of some versions, the last ones among them."""
    last = len(trained.points) - 1
    each = max(1, last // POINTS)
    chosen = {*range(0, last + 1, each), *range(max(0, last - LAST + 1), last + 1)}
    some = [trained.points[n] for n in sorted(chosen)]
    return [(*point[:2], losses(point[2])) for point in timing.progress(some, "held-out loss")]


def _row(series: Series, scale: Scale, trained: Trained, curves: dict[str, Any]) -> report.Row:
    loss = _end(curves[series.name]) if trained.useful >= scale.tokens else None
    base = curves.get(ONE if series.is_one else NONE)
    more = loss - _end(base) if loss is not None and base else None
    return {
        "series": series.name,
        "seconds": trained.seconds,
        "killed": trained.kills[0],
        "mergers killed": trained.kills[1],
        "versions": trained.versions,
        "wrong or lost": trained.bad,
        "late": trained.late,
        "goodput": trained.useful / trained.full,
        "living": trained.could / trained.full,
        "useful/living": trained.useful / trained.could if trained.could else None,
        "useful/made": trained.useful / trained.made if trained.made else None,
        "held-out nats": loss,
        "than without faults": more,
    }


def _end(curve: list[tuple[float, float, float]]) -> float:
    return float(np.mean([loss for _, _, loss in curve[-LAST:]]))


def _notes(scale: Scale) -> list[str]:
    return [
        f"A step takes {scale.step_seconds:g} s. An island that was killed (kill -9) is started"
        f" again {scale.down_seconds:g} s later on average, and then needs time to build its"
        " session.",
        '"1 in N" means that one in N steps of an island ends with a kill of the island.'
        ' "one program" is a program with OuterOptimizer: a kill ends all islands of this program.',
        '"goodput" is the number of tokens in the last version of the values, divided by the tokens'
        " that all islands could train on if no island was killed or slow."
        ' "living" divides the tokens that the running islands could train on by the tokens that'
        " all islands could train on.",
        '"useful/living" divides the tokens in the last version by the tokens that running islands'
        ' could train on, and "useful/made" by the tokens that running islands did train on.',
        'Islands exchange values every 10 steps, and train on during an exchange (wait="none").'
        f' "held-out nats" is the mean loss of the last {LAST} versions at the same number of'
        " tokens, and is empty if a series was stopped before this number.",
    ]


def _targets(rows: list[report.Row]) -> Iterator[report.Target]:
    for row in rows:
        if row["series"].startswith(NONE):
            what = f"{row['series']}: "
            yield report.Target(
                f"{what}part lost of what living islands could do",
                1.0 - row["useful/living"], 1.0 - GOODPUT, "",
            )  # fmt: skip
            if row["than without faults"] is not None and "seed" not in row["series"]:
                yield report.Target(
                    f"{what}nats above no faults", row["than without faults"], NATS, ""
                )
    bad = sum(row["wrong or lost"] for row in rows)
    yield report.Target("wrong or lost versions", bad, 0.0, "")


def _plot(axes: Any, curves: dict[str, Any], rows: list[report.Row]) -> None:
    figure = axes.figure
    axes.remove()
    figure.set_size_inches(13, 4.5)
    by_steps, by_time, bars = figure.subplots(1, 3)
    for number, (name, curve) in enumerate(curves.items()):
        style = dict(color=f"C{number % 10}", ls="--" if name.startswith(ONE) else "-", label=name)
        if curve:
            tokens, seconds, losses = zip(*curve)
            by_steps.plot([t / TOKENS / ISLANDS for t in tokens], losses, **style)
            by_time.plot(seconds, losses, **style)
    by_steps.set_xlabel("useful steps of each island")
    by_time.set_xlabel("seconds")
    for one in (by_steps, by_time):
        one.set_ylabel("held-out nats a byte")
        one.set_ylim(top=3.5)
    by_time.legend(fontsize=6)
    places = np.arange(len(rows))[::-1]
    bars.barh(places, [row["living"] for row in rows], color="0.85", label="living")
    bars.barh(places, [row["goodput"] for row in rows], height=0.5, label="goodput")
    bars.set_yticks(places, [row["series"] for row in rows], fontsize=6)
    bars.set_xlabel("of full strength")
    bars.legend(fontsize=7)


if __name__ == "__main__":
    command = "python -m benchmarks.islands"
    sys.exit(report.main([measure, measure_kills], command, {"series": available()}, SETTINGS))
