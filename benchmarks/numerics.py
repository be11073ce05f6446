"""What a step takes with a loss scale, with norms of shards, and with the noise scale."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Callable, Iterator

import mtf_gradsync as gs
from benchmarks import models, report, timing
from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import mtf

PLAIN, SCALED, NOISE = "plain", "loss scale", "noise scale"
STEPS = 2
# Of a step without, on XLA devices and on the placement mesh.
LIMIT = 1.02


def measure(options: report.Options) -> report.Table:
    """Both models, on XLA devices and on `placement_mesh_impl`."""
    rows: list[report.Row] = []
    targets: list[report.Target] = []
    for model in models.models(options.quick):
        row: report.Row = {"model": model.name}
        for place, seconds in (
            ("XLA", _on_devices(model, options)),
            ("placement", _on_placement_mesh(model, options)),
        ):
            for name in seconds:
                row[f"{place} {name} ms"] = timing.spread([1e3 * s for s in seconds[name]])
            for name in (SCALED, NOISE):
                row[f"{place} {name}/plain"] = timing.ratio(seconds, name, PLAIN)
            if not options.quick:
                ratio = row[f"{place} {NOISE}/plain"].median
                targets.append(report.Target(f"noise scale, {model.name}, {place}", ratio, LIMIT))
        rows.append(row)
    return report.Table(
        name="numerics",
        title="Loss scale and noise scale against CrossShardOptimizer alone",
        rows=rows,
        notes=(
            "noise scale: with the norms of the shards' gradients, on every step.",
            "placement: on mtf_gradsync.placement_mesh_impl, Grappler off.",
        ),
        targets=targets,
    )


def _build(model: models.Model, name: str, block: Callable[[], Any]) -> models.Program:
    def scaled() -> Any:
        return gs.LossScaleOptimizer(gs.CrossShardOptimizer(model.make_optimizer()))

    def noise(optimizer: Any) -> tuple[list[mtf.Operation], list[mtf.Tensor]]:
        scale = gs.gradient_noise_scale(optimizer, len(model.batch))
        return scale.updates, [scale.value, gs.reported(optimizer)["gradient_norm/of_shards"]]

    if name == SCALED:
        return models.build(model._replace(make_optimizer=scaled), models.BARE, block)
    return models.build(model, models.WRAPPED, block, more=noise if name == NOISE else None)


def _on_devices(model: models.Model, options: report.Options) -> dict[str, list[float]]:
    with contextlib.ExitStack() as stack:
        steps = {}
        for name in (PLAIN, SCALED, NOISE):
            programs: list[simd.Program] = []

            @contextlib.contextmanager
            def block(programs: list[simd.Program] = programs) -> Iterator[Any]:
                with simd.tpu_program(model.mesh_shape, model.layout) as program:
                    programs.append(program)
                    yield program.mesh_impl

            built = _build(model, name, block)
            session = stack.enter_context(xla.session(programs[0], built.lowering, cache_dir=None))
            fetches, feeds = [built.loss, built.update], {built.x: model.batch}
            steps[name] = lambda s=session, f=fetches, d=feeds: s.run(f, d)[0]
        models.check_same_training({n: [step() for _ in range(3)] for n, step in steps.items()})
        return timing.interleave(steps, options.rounds, STEPS, f"{model.name} devices", True)


def _on_placement_mesh(model: models.Model, options: report.Options) -> dict[str, list[float]]:
    def mesh() -> Any:
        return contextlib.nullcontext(models.placement_mesh(model, gs.placement_mesh_impl))

    programs = {name: _build(model, name, mesh) for name in (PLAIN, SCALED, NOISE)}
    return models.time_steps(model, programs, False, options)


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.numerics"))
