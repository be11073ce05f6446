"""Mesh-TensorFlow's races on a placement mesh, and the same programs without them.

Runs each program several times on the same data, bare and wrapped, and compares its losses with
those of the same program on one processor, where nothing runs side by side. See docs/races.md.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

import numpy as np

from benchmarks import models, report, timing
from mtf_gradsync._tf_compat import mtf

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SgdOptimizer": lambda: mtf.optimize.SgdOptimizer(0.5),
    "MomentumOptimizer": lambda: mtf.optimize.MomentumOptimizer(0.1, 0.9),
    "AdamWeightDecayOptimizer": lambda: mtf.optimize.AdamWeightDecayOptimizer(1e-3),
}


def measure(options: report.Options) -> report.Table:
    """Repeats each program in sessions of its own."""
    sessions, steps = (2, 3) if options.quick else (8, 40)
    base = models.dense(layers=4 if options.quick else 12)
    rows: list[report.Row] = []
    for name, make_optimizer in timing.progress(OPTIMIZERS.items(), "races"):
        model = base._replace(make_optimizer=make_optimizer)
        alone = model._replace(mesh_shape="all:1")
        (expected,) = _losses(alone, models.BARE, 1, steps)
        for variant in (models.BARE, models.WRAPPED):
            runs = _losses(model, variant, sessions, steps)
            off = max(float(np.max(np.abs(np.divide(run, expected) - 1))) for run in runs)
            rows.append(
                {
                    "optimizer": name,
                    "variant": variant,
                    "sessions": sessions,
                    "different results": len(set(runs)),
                    "largest relative error": off,
                }
            )
    return report.Table(
        name="races",
        title=f"Losses of {steps} steps, the same program and data in {sessions} sessions",
        rows=rows,
        notes=(
            "different results: sequences of losses that differ in any bit; 1 is repeatable.",
            "largest relative error: of any loss, against the program on one processor.",
        ),
    )


def _losses(
    model: models.Model, variant: str, sessions: int, steps: int
) -> list[tuple[float, ...]]:
    program = models.build(model, variant)
    runs = []
    for _ in range(sessions):
        with models.running(model, program, models.session_config(model)) as step:
            runs.append(tuple(float(step()) for _ in range(steps)))
    return runs


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.races"))
