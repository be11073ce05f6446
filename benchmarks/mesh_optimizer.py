"""Time of a training step with MeshOptimizer(AdamOptimizer), against Mesh-TF's own Adam."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Callable

import mtf_gradsync as gs
from benchmarks import models, report, timing
from mtf_gradsync._private.libraries import mtf, tf

TARGET = 1.05
RATE = 1e-3
STEPS = 4
OWN, V1 = "Mesh-TF's Adam", "MeshOptimizer"
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    OWN: lambda: mtf.optimize.AdamWeightDecayOptimizer(RATE),
    V1: lambda: gs.MeshOptimizer(tf.train.AdamOptimizer(RATE)),
}


def measure(options: report.Options) -> report.Table:
    """Steps of both models with both optimizers, bare and in CrossShardOptimizer, in turns."""
    rows: list[report.Row] = []
    targets = []
    for model in models.models(options.quick):
        config = models.session_config(model)
        for variant in (models.BARE, models.WRAPPED):
            with contextlib.ExitStack() as stack:
                steps = {}
                for name, make in OPTIMIZERS.items():
                    built = models.build(model._replace(make_optimizer=make), variant)
                    steps[name] = stack.enter_context(models.running(model, built, config))
                seconds = timing.interleave(
                    steps, options.rounds, STEPS, f"{model.name} {variant}", True
                )
            row: dict[str, Any] = {"model": model.name, "gradients": variant}
            row.update((f"{n} ms", timing.spread([1e3 * s for s in seconds[n]])) for n in steps)
            row["ratio"] = timing.ratio(seconds, V1, OWN)
            rows.append(row)
            if not options.quick:
                what = f"{variant} step of {model.name} with MeshOptimizer against Mesh-TF's Adam"
                targets.append(report.Target(what, row["ratio"].median, TARGET))
    return report.Table(
        name="mesh_optimizer",
        title="Training step with an optimizer of tf.compat.v1 (Adam), against Mesh-TF's own",
        rows=rows,
        notes=("wrapped: both in CrossShardOptimizer; on a placement mesh.",),
        targets=targets,
    )


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.mesh_optimizer"))
