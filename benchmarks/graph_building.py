"""Processor time to build and lower a training step, and the operations that it has."""

from __future__ import annotations

import gc
import sys

from benchmarks import models, report, timing

TARGET = 0.85


def measure(options: report.Options) -> report.Table:
    """Builds both models again and again, bare and wrapped in turns."""
    # A build takes seconds where a step takes milliseconds, and varies less.
    rounds = max(1, options.rounds // 2)
    rows: list[report.Row] = []
    targets = []
    for model in models.models(options.quick):
        variants = (models.BARE, models.WRAPPED)
        # Not counted: the first build also imports what is imported when first used.
        operations = {v: len(models.build(model, v).graph.get_operations()) for v in variants}
        seconds: dict[str, list[float]] = {v: [] for v in variants}
        for number in timing.progress(range(rounds), f"{model.name} graph"):
            for variant in variants if number % 2 == 0 else variants[::-1]:
                gc.collect()
                seconds[variant].append(models.build(model, variant).seconds)
        ratio = timing.ratio(seconds, models.WRAPPED, models.BARE)
        rows.append(
            {
                "model": model.name,
                "bare s": timing.spread(seconds[models.BARE]),
                "wrapped s": timing.spread(seconds[models.WRAPPED]),
                "wrapped/bare": ratio,
                "bare ops": operations[models.BARE],
                "wrapped ops": operations[models.WRAPPED],
            }
        )
        if not options.quick:
            targets += [
                report.Target(f"building and lowering {model.name}", ratio.median, TARGET),
                report.Target(
                    f"graph operations of {model.name}",
                    operations[models.WRAPPED] / operations[models.BARE],
                    1.0,
                ),
            ]
    return report.Table(
        name="graph_building",
        title="Building and lowering a training step, on a placement mesh, in seconds of CPU time",
        rows=rows,
        targets=targets,
    )


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.graph_building"))
