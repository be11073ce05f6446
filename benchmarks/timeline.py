"""What recording a timeline costs the steps that are recorded."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from typing import Any

import mtf_gradsync as gs
from benchmarks import models, report, runtimes, timing

NEVER, PLAIN, RECORDED = "never recorded", "plain", "recorded"
TARGET = 1.2
STEPS = 5


def measure(options: report.Options) -> report.Table:
    """Steps of both models in turns: recorded, not recorded, and of a session that never was."""
    rows: list[report.Row] = []
    targets = []
    for model in models.models(options.quick):
        for runtime in (runtimes.REPLICAS, runtimes.DEVICES):
            with contextlib.ExitStack() as stack:
                session, never = (
                    stack.enter_context(runtimes.Session(model, runtime)) for _ in range(2)
                )
                sessions = {NEVER: never, PLAIN: session, RECORDED: session}
                for _ in range(3):
                    session.step()
                    never.step()
                _step_seconds(session, recorded=True)
                seconds: dict[str, list[float]] = {name: [] for name in sessions}
                what = f"{model.name}, {runtime}"
                for number in timing.progress(range(options.rounds), what):
                    for name in list(sessions)[:: 1 if number % 2 else -1]:
                        seconds[name].append(_step_seconds(sessions[name], name == RECORDED))
            row: dict[str, Any] = {"model": model.name, "runtime": runtime}
            row.update((f"{n} ms", timing.spread([1e3 * s for s in seconds[n]])) for n in seconds)
            row[f"{PLAIN}/{NEVER}"] = timing.ratio(seconds, PLAIN, NEVER)
            row[f"{RECORDED}/{PLAIN}"] = timing.ratio(seconds, RECORDED, PLAIN)
            rows.append(row)
            if runtime == runtimes.DEVICES and not options.quick:
                ratio = row[f"{RECORDED}/{PLAIN}"].median
                targets.append(report.Target(f"recorded step of {model.name}", ratio, TARGET))
    return report.Table(
        name="timeline",
        title="A training step while gs.timeline records it, against one that it does not",
        rows=rows,
        notes=(
            "The beginning and the end of a recording are not in the steps.",
            "plain: between two recordings of the session; never recorded: another session.",
        ),
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
