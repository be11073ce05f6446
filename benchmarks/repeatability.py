"""What the repeatable session configuration costs, and what it buys."""

from __future__ import annotations

import contextlib
import sys

from benchmarks import models, report, timing

SESSIONS = 5
STEPS = 5


def measure(options: report.Options) -> report.Table:
    """Runs one wrapped program with repeatable=True and with repeatable=False."""
    sessions = 2 if options.quick else SESSIONS
    rows: list[report.Row] = []
    for model in models.models(options.quick):
        program = models.build(model, models.WRAPPED)
        configs = {
            name: models.session_config(model, repeatable=name == "repeatable")
            for name in ("repeatable", "TensorFlow's")
        }
        trajectories = {
            name: len({_losses(model, program, config) for _ in range(sessions)})
            for name, config in configs.items()
        }
        with contextlib.ExitStack() as stack:
            steps = {
                name: stack.enter_context(models.running(model, program, config))
                for name, config in configs.items()
            }
            for step in steps.values():
                for _ in range(3):
                    step()
            seconds = timing.interleave(steps, options.rounds, 2, f"{model.name} repeatable")
        for name in configs:
            rows.append(
                {
                    "model": model.name,
                    "arithmetic optimizer, constant folding": "off"
                    if name == "repeatable"
                    else "on",
                    "ms": timing.spread([1e3 * s for s in seconds[name]]),
                    "off/on": timing.ratio(seconds, "repeatable", "TensorFlow's")
                    if name == "repeatable"
                    else None,
                    f"different of {sessions} runs": trajectories[name],
                }
            )
    return report.Table(
        name="repeatability",
        title="Step time of session_config(repeatable=True) (off) against False (on)",
        rows=rows,
        notes=(
            f"different of {sessions} runs: how many different sequences of {STEPS} losses that "
            "many sessions of the same program gave, bit for bit; 1 is repeatable.",
        ),
    )


def _losses(model: models.Model, program: models.Program, config: object) -> tuple:
    with models.running(model, program, config) as step:
        return tuple(float(step()) for _ in range(STEPS))


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.repeatability"))
