"""Step time by bucket size on a placement mesh: where FusedAllReduce's default comes from."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import mtf_gradsync as gs
from benchmarks import models, report, timing
from mtf_gradsync.reduce import fused

SIZES = (0, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20)


def measure(options: report.Options) -> report.Table:
    """Times both models with each bucket size, relative to reducing every gradient alone."""
    default = fused.PLACEMENT_BUCKET_BYTES
    sizes = (0, default) if options.quick else sorted({*SIZES, default})
    rows: list[report.Row] = []
    for model in models.models(options.quick):
        programs = {
            str(size): models.build(
                model, models.WRAPPED, reducer=gs.FusedAllReduce(bucket_bytes=size)
            )
            for size in sizes
        }
        config = models.session_config(model, grappler=False)
        with contextlib.ExitStack() as stack:
            steps = {
                name: stack.enter_context(models.running(model, program, config))
                for name, program in programs.items()
            }
            models.check_same_training({n: [step() for _ in range(3)] for n, step in steps.items()})
            seconds = timing.interleave(steps, options.rounds, 2, f"{model.name} buckets")
        for name, program in programs.items():
            rows.append(
                {
                    "model": model.name,
                    "bucket bytes": int(name),
                    "ms": timing.spread([1e3 * s for s in seconds[name]]),
                    "relative to 0": timing.ratio(seconds, name, "0"),
                    "graph ops": len(program.graph.get_operations()),
                    "default": "yes" if int(name) == default else "",
                }
            )
    return report.Table(
        name="bucket_size",
        title="Training step by bucket size, placement mesh, Grappler off",
        rows=rows,
        notes=("0 bytes: every gradient crosses the mesh alone.", *_best(rows)),
        plot=lambda axes: _plot(axes, rows),
    )


def _by_model(rows: list[report.Row]) -> dict[str, list[report.Row]]:
    grouped: dict[str, list[report.Row]] = {}
    for row in rows:
        grouped.setdefault(row["model"], []).append(row)
    return grouped


def _best(rows: list[report.Row]) -> list[str]:
    notes = []
    for model, some in _by_model(rows).items():
        best = min(some, key=lambda row: row["relative to 0"].median)
        default = next(row for row in some if row["default"])
        notes.append(
            f"{model}: fastest with {best['bucket bytes']:,} bytes; the default takes "
            f"{default['relative to 0'].median / best['relative to 0'].median:.2f}x of that."
        )
    return notes


def _plot(axes: Any, rows: list[report.Row]) -> None:
    for model, some in _by_model(rows).items():
        ratios = [row["relative to 0"] for row in some]
        errors = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
        axes.errorbar(range(len(some)), [r.median for r in ratios], errors, marker="o", label=model)
        axes.set_xticks(range(len(some)))
        axes.set_xticklabels([_size(row["bucket bytes"]) for row in some])
    axes.set_xlabel("bucket_bytes")
    axes.set_ylabel("step time relative to no packing")
    axes.legend()


def _size(size: int) -> str:
    if size >= 1 << 20:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size else "0"


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.bucket_size"))
