"""Mesh-TensorFlow's races on a placement mesh, and the same programs without them.

Runs each program several times on the same data, bare and wrapped, and compares its losses with
those of the wrapped program on one processor. Autostack is off: it merges all variables of a shape
into one, and with them the updates, which leaves little to race. See docs/races.md.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

import numpy as np

from benchmarks import models, report, timing
from mtf_gradsync._private.libraries import mtf, tf

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SgdOptimizer": lambda: mtf.optimize.SgdOptimizer(0.5),
    "MomentumOptimizer": lambda: mtf.optimize.MomentumOptimizer(0.1, 0.9),
    "AdamWeightDecayOptimizer": lambda: mtf.optimize.AdamWeightDecayOptimizer(1e-3),
}


def measure(options: report.Options) -> report.Table:
    """Repeats each program in sessions of its own."""
    sessions, steps = (2, 3) if options.quick else (8, 40)
    base = models.dense(layers=3) if options.quick else models.dense(layers=6, width=128)
    rows: list[report.Row] = []
    for name, make_optimizer in timing.progress(OPTIMIZERS.items(), "races"):
        model = base._replace(make_optimizer=make_optimizer)
        alone = model._replace(mesh_shape="all:1")
        ((expected, _),) = _runs(alone, models.WRAPPED, 1, steps)
        for variant in (models.BARE, models.WRAPPED):
            runs = _runs(model, variant, sessions, steps)
            off = max(float(np.max(np.abs(np.divide(x, expected) - 1))) for x, _ in runs)
            rows.append(
                {
                    "optimizer": name,
                    "variant": variant,
                    "sessions": sessions,
                    "different results": len({losses for losses, _ in runs}),
                    "largest relative error": off,
                    "copies drifted": sum(drifted for _, drifted in runs),
                }
            )
    return report.Table(
        name="races",
        title=f"Losses of {steps} steps, the same program and data in {sessions} sessions each",
        rows=rows,
        notes=(
            "different results: sequences of losses that differ in any bit; 1 is repeatable.",
            "largest relative error: of any loss, against the program on one processor.",
            "copies drifted: sessions after which a variable's copies on the processors differ.",
        ),
    )


def _runs(
    model: models.Model, variant: str, sessions: int, steps: int
) -> list[tuple[tuple[float, ...], bool]]:
    """For each session its losses, and whether the copies of some variable differ at the end."""
    program = models.build(model, variant, autostack=False)
    with program.graph.as_default():
        # No variable is split here: each slice is a copy of the whole.
        copies = [
            [x.read_value() for x in variable.laid_out_tensor.tensor_list]
            for variable in program.lowering.variables.values()
        ]
    runs = []
    for _ in range(sessions):
        with models.running(model, program, models.session_config(model)) as step:
            losses = tuple(float(step()) for _ in range(steps))
            values = tf.get_default_session().run(copies)
        drifted = any(np.any(x != first) for first, *rest in values for x in rest)
        runs.append((losses, drifted))
    return runs


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.races"))
