"""What recording a timeline costs the steps that are recorded."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from typing import Any

import mtf_gradsync as gs
from benchmarks import models, report, runtimes, timing

PLAIN, RECORDED = "plain", "recorded"
TARGET = 1.2
STEPS = 5


def measure(options: report.Options) -> report.Table:
    """Steps of both models, recorded and not, in turns."""
    rows: list[report.Row] = []
    targets = []
    for model in models.models(options.quick):
        for runtime in (runtimes.REPLICAS, runtimes.DEVICES):
            with runtimes.Session(model, runtime) as session:
                for _ in range(3):
                    session.step()
                seconds: dict[str, list[float]] = {PLAIN: [], RECORDED: []}
                what = f"{model.name}, {runtime}"
                for number in timing.progress(range(options.rounds), what):
                    for name in (PLAIN, RECORDED)[:: 1 if number % 2 else -1]:
                        seconds[name].append(_step_seconds(session, name == RECORDED))
            row: dict[str, Any] = {"model": model.name, "runtime": runtime}
            row.update((f"{n} ms", timing.spread([1e3 * s for s in seconds[n]])) for n in seconds)
            row[f"{RECORDED}/{PLAIN}"] = timing.ratio(seconds, RECORDED, PLAIN)
            rows.append(row)
            if runtime == runtimes.DEVICES and not options.quick:
                ratio = row[f"{RECORDED}/{PLAIN}"].median
                targets.append(report.Target(f"recorded step of {model.name}", ratio, TARGET))
    return report.Table(
        name="timeline",
        title="A training step while gs.timeline records it, against one that it does not",
        rows=rows,
        notes=("The beginning and the end of a recording are not in the steps.",),
        targets=targets,
    )


def _step_seconds(session: runtimes.Session, recorded: bool) -> float:
    """Seconds of a step, of some in a row."""
    gc.collect()
    block = gs.timeline(session.session) if recorded else contextlib.nullcontext()
    with block:
        session.step()  # after the other kind's
        start = time.perf_counter()
        for _ in range(STEPS):
            session.step()
        return (time.perf_counter() - start) / STEPS


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.timeline"))
