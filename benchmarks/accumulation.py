"""Gradient accumulation against bare Mesh-TensorFlow with an update on every microbatch step."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from typing import Any, Callable, Iterator

import numpy as np

import mtf_gradsync as gs
from benchmarks import models, report, timing
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf

K = 8
# The mean microbatch step against bare; a microbatch step without update against forward, backward
# and one pass over the accumulators.
TARGET_MEAN, TARGET_NO_UPDATE = 0.75, 1.05
ACCUMULATED, PASS = "accumulated", "floor and a pass"


def measure(options: report.Options) -> report.Table:
    """Microbatch steps of the language model, and what they send."""
    (model,) = (m for m in models.models(options.quick) if m.name == "lm")
    accumulated = model._replace(make_optimizer=lambda: _accumulating(model))
    programs = {
        models.BARE: models.build(model, models.BARE),
        ACCUMULATED: models.build(accumulated, models.BARE),
        models.FLOOR: models.build(model, models.FLOOR),
    }
    programs[PASS] = _with_a_pass(model, programs[models.FLOOR])
    rows: list[report.Row] = []
    ratios = {}
    for grappler in (True, False):
        # Grappler drops what nothing but control edges use, which is all of the floor.
        measured = {n: p for n, p in programs.items() if not (grappler and n == models.FLOOR)}
        seconds = _time(model, measured, grappler, options)
        kinds = {
            "bare, an update each": seconds[models.BARE].mean(axis=1),
            f"accumulated, mean of {K}": seconds[ACCUMULATED].mean(axis=1),
            "accumulated, no update": np.median(seconds[ACCUMULATED][:, : K - 1], axis=1),
            "accumulated, update": seconds[ACCUMULATED][:, K - 1],
            "floor and a pass": np.median(seconds[PASS], axis=1),
        }
        if not grappler:
            kinds["floor"] = np.median(seconds[models.FLOOR], axis=1)
        bare, _, _, _, with_pass = list(kinds.values())[:5]
        for name, values in kinds.items():
            ratios[name, grappler] = timing.spread(values / bare), timing.spread(values / with_pass)
            rows.append(
                {
                    "microbatch step": name,
                    "Grappler": "on" if grappler else "off",
                    "ms": timing.spread(1e3 * values),
                    "against bare": ratios[name, grappler][0],
                    "against floor and a pass": ratios[name, grappler][1],
                }
            )
    sent = _gradient_bytes(model, accumulated)
    targets = [
        report.Target(
            f"gradient bytes an update against 1/{K} of bare",
            K * sent["accumulated"] / sent["bare"],
            1.0,
        )
    ]
    if not options.quick:
        targets += [
            report.Target(
                "mean microbatch step against bare",
                ratios[f"accumulated, mean of {K}", True][0].median,
                TARGET_MEAN,
            ),
            report.Target(
                "microbatch step without update against floor and a pass",
                ratios["accumulated, no update", True][1].median,
                TARGET_NO_UPDATE,
            ),
        ]
    return report.Table(
        name="accumulation",
        title=f"A microbatch step of {model.name}, {K} for each update (median and quartiles over "
        "rounds; ratios are made round by round)",
        rows=rows,
        notes=(
            f"{programs[models.BARE].parameters:,} parameters, Adafactor, mesh {model.mesh_shape}.",
            "floor: forward and backward alone. A pass: partial sums are added to variables.",
            "Gradient bytes that a core puts into collectives for one update, read from the SIMD "
            f"program: bare {sent['bare']:,} ({K} updates), accumulated {sent['accumulated']:,}, "
            f"of which {sent['no update']:,} on each microbatch step without update.",
        ),
        targets=targets,
    )


def _accumulating(model: models.Model) -> gs.GradientAccumulationOptimizer:
    return gs.GradientAccumulationOptimizer(
        model.make_optimizer(), K, mesh_shape=model.mesh_shape, layout=model.layout
    )


def _with_a_pass(model: models.Model, floor: models.Program) -> models.Program:
    """A floor whose partial sums are added to variables, one on each device, and nothing else."""
    devices = models.placement_mesh(model).devices
    adds = []
    with floor.graph.as_default(), tf.variable_scope("pass", use_resource=True):
        for number, grad in enumerate(floor.grads):
            lowered = floor.lowering.tensors[grad]
            if isinstance(lowered, mtf.LazyAllreduceSum):
                lowered = lowered.laid_out_input
            for device, x in zip(devices, lowered.to_laid_out_tensor().tensor_list):
                with tf.device(device):
                    accumulator = tf.get_variable(
                        f"{number}{device.replace(':', '_').replace('/', '_')}",
                        x.shape,
                        x.dtype,
                        tf.zeros_initializer(),
                        trainable=False,
                    )
                    adds.append(tf.assign_add(accumulator, x).op)
        update = tf.group(floor.update, *adds)
    return floor._replace(update=update)


def _time(
    model: models.Model,
    programs: dict[str, models.Program],
    grappler: bool,
    options: report.Options,
) -> dict[str, np.ndarray]:
    """Seconds of each microbatch step, `[rounds, K]`, programs in turns."""
    config = models.session_config(model, grappler)
    seconds: dict[str, list[list[float]]] = {name: [] for name in programs}
    with contextlib.ExitStack() as stack:
        steps = {
            name: stack.enter_context(models.running(model, program, config))
            for name, program in programs.items()
        }
        # A whole cycle, so that rounds begin where an accumulation does.
        losses = {name: [step() for _ in range(K)] for name, step in steps.items()}
        # The variables stand still until the update.
        models.check_same_training({n: v[:1] for n, v in losses.items()})
        models.check_same_training({n: losses[n] for n in (PASS, ACCUMULATED)})
        for number in timing.progress(range(options.rounds), f"{model.name} microbatch steps"):
            order = list(steps) if number % 2 == 0 else list(reversed(list(steps)))
            for name in order:
                gc.collect()
                seconds[name].append([_seconds(steps[name]) for _ in range(K)])
    return {name: np.array(values) for name, values in seconds.items()}


def _seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _gradient_bytes(model: models.Model, accumulated: models.Model) -> dict[str, int]:
    """Bytes that a core puts into collectives of gradients.

    Returns:
      "bare": for K microbatch steps with an update each. "accumulated": for K microbatch steps with
      one update. "no update": of that, for each microbatch step, whether or not there is an update.
    """
    bare, once = (
        [row for row in _collectives(m).rows if row.variables and "batch" in row.group.split("+")]
        for m in (model, accumulated)
    )
    every = sum(row.bytes_per_step for row in once if not row.is_conditional)
    return {
        "bare": K * sum(row.bytes_per_step for row in bare),
        "accumulated": K * every + sum(row.bytes_per_step for row in once if row.is_conditional),
        "no update": every,
    }


def _collectives(model: models.Model) -> simd.CommunicationReport:
    program = models.build(model, models.BARE, lambda: _simd_mesh(model))
    (mesh_impl,) = program.lowering.mesh_to_impl.values()
    return simd.list_collectives(program.graph, mesh_impl, program.lowering)


@contextlib.contextmanager
def _simd_mesh(model: models.Model) -> Iterator[Any]:
    """The model's mesh as TPU cores. Its gradients are what crosses "batch" on the way to state."""
    with simd.tpu_program(model.mesh_shape, model.layout) as program:
        yield program.mesh_impl


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.accumulation"))
