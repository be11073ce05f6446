"""Step time by bucket size on a placement mesh: where FusedAllReduce's default comes from."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Sequence

import mtf_gradsync as gs
from benchmarks import models, report, timing
from mtf_gradsync.reduce.strategy import PLACEMENT_BUCKET_BYTES, PLACEMENT_PACKED_BYTES

SIZES = (0, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20)
DEFAULT = "default"


def measure(options: report.Options) -> report.Table:
    """Times both models with each bucket size, relative to reducing every gradient alone."""
    sizes = SIZES[:2] if options.quick else SIZES
    reducers = {str(size): gs.FusedAllReduce(bucket_bytes=size) for size in sizes}
    reducers[DEFAULT] = gs.FusedAllReduce()
    rows: list[report.Row] = []
    for model in models.models(options.quick):
        programs = {
            name: models.build(model, models.WRAPPED, reducer=reducer)
            for name, reducer in reducers.items()
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
                    "bucket bytes": name,
                    "ms": timing.spread([1e3 * s for s in seconds[name]]),
                    "relative to 0": timing.ratio(seconds, name, "0"),
                    "graph ops": len(program.graph.get_operations()),
                }
            )
    return report.Table(
        name="bucket_size",
        title="Training step by bucket size, placement mesh, Grappler off",
        rows=rows,
        notes=(
            "0 bytes: every gradient is reduced alone. A size: whatever fits is packed. "
            f"default: FusedAllReduce(), buckets of {_size(PLACEMENT_BUCKET_BYTES)} of tensors of "
            f"up to {_size(PLACEMENT_PACKED_BYTES)}.",
            *_best(rows),
        ),
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
        *sized, default = some
        best = min(sized, key=lambda row: row["relative to 0"].median)
        notes.append(
            f"{model}: the fastest size is {_size(int(best['bucket bytes']))}; the default takes "
            f"{default['relative to 0'].median / best['relative to 0'].median:.2f}x of that."
        )
    return notes


def _plot(axes: Any, rows: list[report.Row]) -> None:
    for model, some in _by_model(rows).items():
        *sized, default = [row["relative to 0"] for row in some]
        drawn = axes.errorbar(range(len(sized)), *_points(sized), marker="o", label=model)
        axes.errorbar([len(sized)], *_points([default]), marker="s", color=drawn[0].get_color())
        axes.set_xticks(range(len(some)))
        axes.set_xticklabels([_label(row["bucket bytes"]) for row in some])
    axes.set_xlabel("bucket_bytes")
    axes.set_ylabel("step time relative to no packing")
    axes.legend()


def _points(ratios: Sequence[timing.Spread]) -> tuple[list[float], list[list[float]]]:
    """Medians, and how far the quartiles are below and above."""
    errors = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
    return [r.median for r in ratios], errors


def _label(name: str) -> str:
    return name if name == DEFAULT else _size(int(name))


def _size(size: int) -> str:
    if size >= 1 << 20:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size else "0"


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.bucket_size"))
