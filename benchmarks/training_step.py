"""Time of a training step, wrapped against bare Mesh-TensorFlow."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import mtf_gradsync as gs
from benchmarks import models, report, timing

# The wrapped optimizer on the package's placement mesh.
MESH = "wrapped+mesh"
# What a step may take, as a share of the bare one; Grappler off.
TARGETS = {models.WRAPPED: {"dense": 0.5, "lm": 0.93}, MESH: {"dense": 0.5, "lm": 0.85}}


def measure(options: report.Options) -> report.Table:
    """Steps of both models, with Grappler and without; without it also the floor."""
    rows: list[report.Row] = []
    targets = []
    for model in models.models(options.quick):
        programs = {v: models.build(model, v) for v in (models.BARE, models.WRAPPED)}
        programs[MESH] = models.build(model, models.WRAPPED, lambda model=model: _mesh(model))
        floor = models.build(model, models.FLOOR)
        for grappler in (True, False):
            measured = programs if grappler else {**programs, models.FLOOR: floor}
            seconds = models.time_steps(model, measured, grappler, options)
            row: dict[str, Any] = {
                "model": model.name,
                "parameters": programs[models.BARE].parameters,
                "Grappler": "on" if grappler else "off",
            }
            for name in programs:
                row[f"{name} ms"] = timing.spread([1e3 * s for s in seconds[name]])
            for name, bounds in TARGETS.items():
                ratio = row[f"{name}/bare"] = timing.ratio(seconds, name, models.BARE)
                if not grappler and not options.quick:
                    what = f"training step of {model.name}, {name}"
                    targets.append(report.Target(what, ratio.median, bounds[model.name]))
            row["floor/bare"] = None
            if not grappler:
                row["floor/bare"] = timing.ratio(seconds, models.FLOOR, models.BARE)
            rows.append(row)
    return report.Table(
        name="training_step",
        title="Training step (median and quartiles over rounds; ratios are made round by round)",
        rows=rows,
        notes=(
            'The model "dense" has 40 layers and 80 gradients, and is trained by Adam on a mesh of'
            " 8 processors.",
            'The model "lm" is a 4-layer transformer, trained by Adafactor on a mesh of 4x2.',
            '"wrapped+mesh" is the wrapped optimizer on a mesh of'
            " mtf_gradsync.placement_mesh_impl.",
            '"floor" is the time of the forward and backward pass alone, without a reduction of'
            " the gradients.",
        ),
        targets=targets,
        plot=lambda axes: _plot(axes, rows),
    )


def _mesh(model: models.Model) -> Any:
    return contextlib.nullcontext(models.placement_mesh(model, gs.placement_mesh_impl))


def _plot(axes: Any, rows: list[report.Row]) -> None:
    for number, name in enumerate((models.BARE, models.WRAPPED, MESH)):
        places = [i + 0.27 * number for i in range(len(rows))]
        axes.bar(places, [row[f"{name} ms"].median for row in rows], 0.25, label=name)
    axes.set_xticks([i + 0.27 for i in range(len(rows))])
    axes.set_xticklabels([f"{row['model']}, Grappler {row['Grappler']}" for row in rows])
    axes.set_ylabel("ms per step")
    axes.legend()


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.training_step"))
