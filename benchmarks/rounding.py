"""What variables in bfloat16 cost, rounded to nearest and by chance: in loss, and on a TPU."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from typing import Any, Iterator, NamedTuple

import numpy as np

import mtf_gradsync as gs
from benchmarks import models, report, tpu_cost
from benchmarks.less_communication import HELD_OUT, batch_of, schedule
from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import mtf, tf

SETTINGS = {"steps": 250, "seeds": 3}
# Of the step that rounds to nearest, in the TPU compiler's estimate.
LIMIT = 1.02
WIDE = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)
NARROW = mtf.VariableDType(tf.bfloat16, tf.bfloat16, tf.bfloat16)


class Way(NamedTuple):
    """How values are stored and rounded.

    Attributes:
      dtype: the dtypes of variables.
      arguments: of `AdamWOptimizer`.
      bytes: of a number of a variable and its two slots.
    """

    dtype: mtf.VariableDType
    arguments: dict[str, Any]
    bytes: int

    def optimizer(self, _: models.Model) -> Any:
        """Makes an optimizer, for programs that are only compiled."""
        return gs.CrossShardOptimizer(gs.AdamWOptimizer(1e-3, **self.arguments))


CHANCE = {"rounding": "stochastic"}
WAYS = {
    "float32": Way(WIDE, {}, 12),
    "bfloat16, to nearest": Way(NARROW, {}, 10),
    "bfloat16, by chance": Way(NARROW, CHANCE, 10),
    "bfloat16 and its slots, by chance": Way(NARROW, {**CHANCE, "slot_dtype": tf.bfloat16}, 6),
}
NEAREST, BY_CHANCE = list(WAYS)[1:3]


def measure(options: report.Options) -> report.Table:
    """Trains a language model with variables stored in each way, from several seeds."""
    steps = 5 if options.quick else int(options.settings.get("steps", SETTINGS["steps"]))
    seeds = 1 if options.quick else int(options.settings.get("seeds", SETTINGS["seeds"]))
    losses: dict[str, list[float]] = {name: [] for name in WAYS}
    # The program is the same for all seeds, and is compiled once.
    with tempfile.TemporaryDirectory() as cache_dir:
        for seed in range(seeds):
            for name, way in WAYS.items():
                losses[name].append(held_out_loss(way, steps, seed, options.quick, cache_dir))
                print(name, seed, losses[name][-1], file=sys.stderr, flush=True)
    rows: list[report.Row] = []
    for name, way in WAYS.items():
        nats = float(np.mean(losses[name]))
        rows.append(
            {
                "variables": name,
                "bytes a number": way.bytes,
                "held-out nats": nats,
                "to float32": nats - rows[0]["held-out nats"] if rows else 0.0,
                "by seed": ", ".join(f"{loss:.3f}" for loss in losses[name]),
            }
        )
    return report.Table(
        name="rounding",
        title=f"A byte-level language model that computes in bfloat16, {steps} steps of AdamW",
        rows=rows,
        notes=(
            '"bytes a number" is the size of one number of a variable together with its two slots.',
            "All rows of a seed have the same batches and the same initial values. Initial values "
            "are rounded to bfloat16 if variables are bfloat16.",
        ),
    )


def held_out_loss(way: Way, steps: int, seed: int, quick: bool, cache_dir: str) -> float:
    """Trains from a seed, and returns the loss on held-out text in nats."""
    size = dict(layers=1, d_model=32, length=16) if quick else dict(layers=2, d_model=64)
    made: list[simd.Program] = []
    model = models.lm(
        batch=16,
        mesh_shape="batch:1",
        layout="batch:batch",
        scaled_embedding=True,
        dtype=way.dtype,
        **size,
    )

    def optimizer() -> Any:
        rate = tf.get_default_graph().get_tensor_by_name("rate:0")
        return gs.CrossShardOptimizer(gs.AdamWOptimizer(rate, 0.0, **way.arguments))

    @contextlib.contextmanager
    def block() -> Iterator[Any]:
        tf.set_random_seed(seed + 1)
        tf.placeholder(tf.float32, [], name="rate")
        with simd.tpu_program(model.mesh_shape, model.layout) as program:
            made.append(program)
            yield program.mesh_impl

    built = models.build(model._replace(make_optimizer=optimizer), models.BARE, block)
    with built.graph.as_default():
        if xla.why_no_xla():
            opened = made[0].session(built.lowering)
        else:
            opened = xla.session(made[0], built.lowering, cache_dir=cache_dir)
    with opened as session, built.graph.as_default():

        def step(split: str, rng: np.random.RandomState, rate: float) -> float:
            x = batch_of(split, model.batch.shape, rng)
            return float(session.run([built.loss, built.update], {built.x: x, "rate:0": rate})[0])

        rng = np.random.RandomState(seed)
        for number in range(steps):
            step("train", rng, schedule(number, steps))
        # At a rate of zero an update changes no variable.
        rng = np.random.RandomState(5)
        return float(np.mean([step("validation", rng, 0.0) for _ in range(HELD_OUT)]))


def measure_cost(options: report.Options) -> report.Table:
    """Compiles a step of the small language model for TPUs, for each way that bfloat16 is kept."""
    rows: list[report.Row] = []
    targets: list[report.Target] = []
    names = [name for name, way in WAYS.items() if way.dtype is NARROW]
    for topology in options.only.get("topologies", tpu_cost.TOPOLOGIES):
        seen = {}
        for name in names:
            way = WAYS[name]
            sizes = (1, 32, 16, 16) if options.quick else tpu_cost.LMS["small lm"]
            model = models.lm(*sizes, dtype=way.dtype)
            program, fetches, _ = tpu_cost._program(model, tpu_cost._Step(way.optimizer))
            compiled = xla.compile_for_tpu(program, fetches, topology)
            if compiled.memory is None:
                raise RuntimeError(f"{topology} refuses {name}: {compiled.error}")
            cost = compiled.estimates["step"]
            row: report.Row = {
                "topology": topology,
                "variables": name,
                "us": 1e6 * cost.compiler_seconds,
                "MB touched": cost.compiler_bytes / 1e6,
                "MB a core": compiled.memory.total / 1e6,
            }
            seen[name] = row
            row["us/nearest"] = row["us"] / seen[NEAREST]["us"]
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
        for name in names[1:]:
            what = f"{name}, {topology}, us"
            targets.append(report.Target(what, seen[name]["us/nearest"], LIMIT))
    return report.Table(
        name="rounding_cost",
        title="What the TPU compiler expects of a step of the small language model in bfloat16",
        rows=rows,
        notes=("These numbers are estimates of the TPU compiler. No step was timed.",),
        targets=targets,
    )


if __name__ == "__main__":
    measures = [measure] + ([] if xla.why_no_tpu_compiler() else [measure_cost])
    parts = {"topologies": tpu_cost.TOPOLOGIES}
    sys.exit(report.main(measures, "python -m benchmarks.rounding", parts, SETTINGS))
