"""One lane of a soak: runs, faults, and what was seen, one after the other."""

from __future__ import annotations

import fcntl
import itertools
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

from mtf_gradsync.train.transformer import transformer_utils
from tests.soak import settings
from tests.soak.faults import Fault, faults_for
from tests.soak.started import Run

_MOST_FAULTS_IN_A_RUN = 8


class Row(NamedTuple):
    """A fault that hit a run.

    Attributes:
      fault: its name.
      runtime: the runtime's name.
      config: the config's name.
      seconds: from the fault to the end of what it ended; 0 where that is not measured.
      problems: what should not have been; empty where all was well.
      same_bits: whether the run came to the variables of the run without faults.
    """

    fault: str
    runtime: str
    config: str
    seconds: float
    problems: list[str]
    same_bits: bool


def soak(
    seed: int,
    faults: int,
    runtimes: Sequence[str],
    configs: Sequence[str],
    directory: Path,
    report: Callable[[Row], None],
) -> None:
    """Hits runs with faults.

    Args:
      seed: of everything that is chosen.
      faults: how many.
      runtimes: names; they take turns, several processes less often.
      configs: names.
      directory: for all files.
      report: takes each fault once its run is over.
    """
    # Imports what the programs need before they are forked.
    transformer_utils()
    import jinja2  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import tensorflow_datasets  # noqa: F401

    import mtf_gradsync.train.gin_files
    import mtf_gradsync.train.run  # noqa: F401

    rng = random.Random(seed)
    kinds = {name: _in_turn(rng, name) for name in runtimes}
    usual: dict[tuple[str, str], float] = {}
    made = 0
    for number in itertools.count():
        if made >= faults:
            return
        runtime = settings.RUNTIMES[_choose(rng, runtimes)]
        config = rng.choice(list(configs))
        home = directory.parent / "references" / runtime.name / config
        if (runtime.name, config) not in usual:
            usual[runtime.name, config] = _reference(runtime, config, home)
        run = Run(
            runtime,
            config,
            directory / f"run-{number}",
            home / "run",
            usual[runtime.name, config],
        )
        most = min(faults - made, rng.randint(1, _MOST_FAULTS_IN_A_RUN))
        rows = _one_run(run, kinds[runtime.name], rng, most)
        made += len(rows)
        for row in rows:
            report(row)
        if all(row.same_bits and not row.problems for row in rows):
            shutil.rmtree(run.scratch)


def _reference(runtime: settings.Runtime, config: str, home: Path) -> float:
    """Makes the run without faults, unless another lane has; returns the seconds that it took."""
    home.mkdir(parents=True, exist_ok=True)
    took = home / "seconds"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # On XLA devices the first one compiles.
        for _ in range(0 if took.exists() else 2 if runtime.binding == "xla" else 1):
            shutil.rmtree(home / "run", ignore_errors=True)
            began = time.monotonic()
            problems = Run(runtime, config, home, usual_seconds=30.0).start().all_end_well(600)
            if problems:
                raise RuntimeError(f"{runtime.name}, {config}, without any fault: {problems}")
            seconds = time.monotonic() - began
            took.write_text(str(seconds), encoding="utf-8")
    return float(took.read_text(encoding="utf-8"))


def _one_run(run: Run, kinds: Iterator[Fault], rng: random.Random, most: int) -> list[Row]:
    """Hits a run until it is over, and compares what it came to."""
    found: list[tuple[Fault, float, list[str]]] = []
    tries = 0
    while len(found) < most and tries < 3 * most:
        tries += 1
        fault = next(kinds)
        if run.first_step() >= settings.STEPS and not fault.afterwards:
            continue
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
        )
        for fault, seconds, own in found
    ]


def _lost(run: Run, before: dict[int, str], fault: Fault) -> list[int]:
    """Checkpoints that were whole, and are gone for another reason than that newer ones came."""
    after = run.whole()
    if fault.damages and before:
        before = {step: path for step, path in before.items() if step != max(before)}
    gone = set(before) - set(after)
    return sorted(step for step in gone if sum(other > step for other in after) < settings.KEEP)


def _in_turn(rng: random.Random, runtime: str) -> Iterator[Fault]:
    """The kinds of faults, each as often as the others."""
    faults = faults_for(len(settings.RUNTIMES[runtime].flags()))
    while True:
        yield from rng.sample(faults, len(faults))


def _choose(rng: random.Random, runtimes: Sequence[str]) -> str:
    return rng.choices(runtimes, [settings.WEIGHTS[name] for name in runtimes])[0]


def write_row(file: Any, row: Row) -> None:
    """Adds a row to a file of JSON lines."""
    file.write(json.dumps(row._asdict()) + "\n")
    file.flush()
