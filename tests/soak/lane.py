"""The runs of one runtime and one config, hit by one fault after the other."""

from __future__ import annotations

import json
import random
import resource
import shutil
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple

from tests.soak import settings
from tests.soak.faults import Fault
from tests.soak.plan import Group
from tests.soak.started import Run

_MOST_FAULTS_IN_A_RUN = 8
# A kind of fault that has come too late so often never hits.
_MOST_MISSES = 20


class Row(NamedTuple):
    """A fault that hit a run.

    Attributes:
      fault: its name.
      runtime: the runtime's name.
      config: the config's name.
      seconds: from the fault to the end of what it ended; 0 where that is not measured.
      problems: what should not have been; empty where all was well.
      same_bits: whether the run came to the variables of the run without faults.
      cpu_seconds: of this fault's part of the run.
    """

    fault: str
    runtime: str
    config: str
    seconds: float
    problems: list[str]
    same_bits: bool
    cpu_seconds: float


def hit(group: Group, references: Path, directory: Path, report: Callable[[Row], None]) -> None:
    """Hits runs with the faults of a group.

    Args:
      group: says what is hit, and by what.
      references: where the runs without faults are; see `make_reference`.
      directory: for all files.
      report: takes each fault once its run is over.
    """
    rng = random.Random(group.seed)
    home = references / group.runtime.name / group.config
    seconds = float((home / "seconds").read_text(encoding="utf-8"))
    todo = list(group.faults)
    number = 0
    while todo:
        run = Run(group.runtime, group.config, directory / f"run-{number}", home / "run", seconds)
        number += 1
        began = _cpu_seconds()
        rows = _one_run(run, todo, rng, rng.randint(1, _MOST_FAULTS_IN_A_RUN))
        for row in rows:
            report(row._replace(cpu_seconds=round((_cpu_seconds() - began) / len(rows), 2)))
        if all(row.same_bits and not row.problems for row in rows):
            shutil.rmtree(run.scratch)


def make_reference(runtime: settings.Runtime, config: str, references: Path) -> None:
    """Makes the run without faults, and leaves the seconds that it took beside it."""
    home = references / runtime.name / config
    # On XLA devices the first one compiles.
    for _ in range(2 if runtime.binding == "xla" else 1):
        shutil.rmtree(home / "run", ignore_errors=True)
        began = time.monotonic()
        problems = Run(runtime, config, home, usual_seconds=30.0).start().all_end_well(600)
        if problems:
            raise RuntimeError(f"{runtime.name}, {config}, without any fault: {problems}")
        seconds = time.monotonic() - began
        (home / "seconds").write_text(str(seconds), encoding="utf-8")


def _one_run(run: Run, todo: list[Fault], rng: random.Random, most: int) -> list[Row]:
    """Hits a run until it is over, and compares what it came to; takes what hit it from a list."""
    found: list[tuple[Fault, float, list[str]]] = []
    misses = 0
    while len(found) < most and todo:
        fault = _next(run, todo)
        if fault is None and run.first_step():
            break
        if fault is None:
            _bring_on(run, rng)
            continue
        todo.remove(fault)
        before = run.whole()
        seen = fault.act(run, rng)
        problems = list(seen.problems)
        lost = _lost(run, before, fault)
        if lost:
            problems.append(f"checkpoints lost: {lost}")
        if seen.hit:
            found.append((fault, seen.seconds, problems))
        elif problems:
            found.append((fault, seen.seconds, [*problems, "(it came too late to hit)"]))
        elif misses < _MOST_MISSES:
            misses += 1
            todo.append(fault)
        else:
            found.append((fault, 0.0, [f"never hit, like {misses} others before it"]))
    problems: list[str] = []
    if run.first_step() < settings.STEPS:
        problems += run.start().all_end_well(run.patience)
    difference = None if problems else run.differs()
    if difference:
        problems.append(difference)
    return [
        Row(
            fault.name,
            run.runtime.name,
            run.config,
            round(seconds, 2),
            [*own, *problems],
            not problems,
            0.0,
        )
        for fault, seconds, own in found
    ]


def _next(run: Run, todo: list[Fault]) -> Fault | None:
    """The first fault that makes sense for a run as it is."""
    is_over, has_checkpoint = run.first_step() >= settings.STEPS, run.newest() is not None
    return next(
        (
            fault
            for fault in todo
            if (fault.afterwards or not is_over) and (has_checkpoint or not fault.needs_checkpoint)
        ),
        None,
    )


def _bring_on(run: Run, rng: random.Random) -> None:
    """Brings a run that has just begun past its first checkpoints."""
    line = rng.randint(settings.SAVE_EVERY + 1, settings.STEPS - 1)
    processes = run.start(json.dumps(["kill_in_metrics", {"line": line}]))
    processes.wait_first(run.patience)
    processes.kill_all()


def _lost(run: Run, before: dict[int, str], fault: Fault) -> list[int]:
    """Checkpoints that were whole, and are gone for another reason than that newer ones came."""
    after = run.whole()
    if fault.damages and before:
        before = {step: path for step, path in before.items() if step != max(before)}
    gone = set(before) - set(after)
    return sorted(step for step in gone if sum(other > step for other in after) < settings.KEEP)


def _cpu_seconds() -> float:
    """What this process and those that it has waited for have used."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def write_row(file: Any, row: Row) -> None:
    """Adds a row to a file of JSON lines."""
    file.write(json.dumps(row._asdict()) + "\n")
    file.flush()
