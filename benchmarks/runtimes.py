"""Time of a training step on every runtime: placement mesh, CPU replicas, XLA devices."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from typing import Any, Callable, Iterator

import mtf_gradsync as gs
from benchmarks import models, report, timing
from mtf_gradsync import simd, xla

BARE, MESH, REPLICAS, DEVICES = "bare", "wrapped+mesh", "CPU replicas", "XLA devices"
# What a step may take on XLA devices, as a share of bare Mesh-TensorFlow's on a placement mesh.
TARGETS = {"dense": 0.2, "lm": 0.6}
STEPS = 4


def measure(options: report.Options) -> report.Table:
    """Steps of both models, wrapped, in turns with bare Mesh-TensorFlow's."""
    rows: list[report.Row] = []
    targets = []
    for model in models.models(options.quick):
        config = models.session_config(model)
        with contextlib.ExitStack() as stack:
            steps: dict[str, Callable[[], float]] = {}
            for name, variant, block in (
                (BARE, models.BARE, None),
                (MESH, models.WRAPPED, lambda model=model: _mesh(model)),
            ):
                program = models.build(model, variant, block)
                steps[name] = stack.enter_context(models.running(model, program, config))
            models.check_same_training({n: [s() for _ in range(3)] for n, s in steps.items()})
            sessions = {n: stack.enter_context(Session(model, n)) for n in (REPLICAS, DEVICES)}
            # Initial values follow from places in the graph: these two take each other's.
            with tempfile.TemporaryDirectory() as directory:
                path = sessions[REPLICAS].session.save(os.path.join(directory, "variables"))
                sessions[DEVICES].session.restore(path)
            simd_steps = {n: session.step for n, session in sessions.items()}
            models.check_same_training({n: [s() for _ in range(3)] for n, s in simd_steps.items()})
            steps.update(simd_steps)
            seconds = timing.interleave(
                steps, options.rounds, STEPS, f"{model.name} runtimes", True
            )
        row: dict[str, Any] = {"model": model.name}
        row.update((f"{n} ms", timing.spread([1e3 * s for s in seconds[n]])) for n in steps)
        for name in (MESH, REPLICAS, DEVICES):
            row[f"{name}/bare"] = timing.ratio(seconds, name, BARE)
        row["XLA start s"] = sessions[DEVICES].first
        rows.append(row)
        if not options.quick:
            what = f"step of {model.name} on XLA devices against bare Mesh-TensorFlow"
            target = TARGETS[model.name]
            targets.append(report.Target(what, row[f"{DEVICES}/bare"].median, target))
    return report.Table(
        name="runtimes",
        title="Training step on every runtime (CrossShardOptimizer), against bare Mesh-TensorFlow",
        rows=rows,
        notes=(
            '"bare" is Mesh-TensorFlow\'s optimizer on its own placement mesh; in all other columns'
            " CrossShardOptimizer wraps it.",
            '"XLA start" is the time from the lowered program to the end of the first step, with an'
            " empty compilation cache.",
        ),
        targets=targets,
        plot=lambda axes: _plot(axes, rows),
    )


def _mesh(model: models.Model) -> Any:
    return contextlib.nullcontext(models.placement_mesh(model, gs.placement_mesh_impl))


class Session:
    """A wrapped model's SIMD program in a session.

    Attributes:
      session: the session.
      first: seconds from the lowered program to a session, and of the first step.
    """

    def __init__(self, model: models.Model, runtime: str):
        programs: list[simd.Program] = []

        @contextlib.contextmanager
        def block() -> Iterator[Any]:
            with simd.tpu_program(model.mesh_shape, model.layout) as program:
                programs.append(program)
                yield program.mesh_impl

        built = models.build(model, models.WRAPPED, block)
        self._fetches, self._feeds = [built.loss, built.update], {built.x: model.batch}
        self._stepped = False
        start = time.perf_counter()
        if runtime == DEVICES:
            self.session = xla.session(programs[0], built.lowering, cache_dir=None)
        else:
            self.session = programs[0].session(built.lowering)
        self.first = time.perf_counter() - start

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.session.close()

    def step(self) -> float:
        """Makes a step and returns the loss before it."""
        start = time.perf_counter()
        loss = self.session.run(self._fetches, self._feeds)[0]
        if not self._stepped:
            self.first, self._stepped = self.first + time.perf_counter() - start, True
        return loss


def _plot(axes: Any, rows: list[report.Row]) -> None:
    for number, name in enumerate((BARE, MESH, REPLICAS, DEVICES)):
        places = [i + 0.2 * number for i in range(len(rows))]
        axes.bar(places, [row[f"{name} ms"].median for row in rows], 0.18, label=name)
    axes.set_xticks([i + 0.3 for i in range(len(rows))])
    axes.set_xticklabels([row["model"] for row in rows])
    axes.set_ylabel("ms per step")
    axes.legend()


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.runtimes"))
