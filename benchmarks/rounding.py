"""What variables in bfloat16 cost, rounded to nearest and by chance: in loss, and on a TPU."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from typing import Any, NamedTuple

import numpy as np

import mtf_gradsync as gs
from benchmarks import less_communication, models, report, tpu_cost
from mtf_gradsync import xla
from mtf_gradsync._private.libraries import mtf, tf

# The README's language model, as `make train` trains it.
README = {"layers": 2, "d_model": 128, "batch": 32, "length": 64}
SETTINGS = {"steps": 700, "seeds": 3}
HELD_OUT = 16
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


class Size(NamedTuple):
    """A language model that is compiled.

    Attributes:
      name: for tables.
      arguments: of `models.lm`.
    """

    name: str
    arguments: dict[str, Any]


_SMALL = Size("small lm", {"layers": 4, "d_model": 128, "batch": 16, "length": 64})
_WIDE = {"layers": 2, "d_model": 768, "batch": 32, "length": 512, "mesh_shape": "batch:8;model:2"}
TOPOLOGIES = {
    **dict.fromkeys(tpu_cost.TOPOLOGIES, _SMALL),
    "v5e:4x4": Size("T5-base's width", _WIDE),
}
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
    settings = {**SETTINGS, **options.settings}
    steps = 5 if options.quick else int(settings["steps"])
    seeds = 1 if options.quick else int(settings["seeds"])
    losses: dict[str, list[float]] = {name: [] for name in options.only.get("ways", WAYS)}
    with Training(options.quick) as training:
        for seed in range(seeds):
            for name, found in losses.items():
                found.append(training.run(WAYS[name], steps, seed))
                print(name, seed, found[-1], file=sys.stderr, flush=True)
                table = _table(losses, steps)
                report.write(table, options)
    return table


def _table(losses: dict[str, list[float]], steps: int) -> report.Table:
    rows: list[report.Row] = []
    first = next(iter(losses.values()))
    for name, found in losses.items():
        if not found:
            continue
        # Seed by seed, as seeds differ by more than ways do.
        changes = [a - b for a, b in zip(found, first)]
        rows.append(
            {
                "variables": name,
                "bytes a number": WAYS[name].bytes,
                "held-out nats": float(np.mean(found)),
                "by seed": ", ".join(f"{loss:.4f}" for loss in found),
                "less first row, by seed": ", ".join(f"{x:+.4f}" for x in changes),
            }
        )
    return report.Table(
        name="rounding",
        title=f"Variables in bfloat16, {steps} steps of AdamW",
        rows=rows,
        notes=(
            "The model is the README's language model, computed in bfloat16 on one core: 2 layers "
            "of width 128, with batches of 32 sequences of 64 bytes. The learning rate is 0.003 "
            "with a warm-up and half a cosine, without weight decay. Embeddings begin like the "
            "weights of a classifier.",
            '"bytes a number" is the size of one number of a variable together with its two slots.',
            f"Losses are computed in float32, on {HELD_OUT} batches of held-out text. All rows of "
            "a seed have the same batches and the same initial values. Initial values are rounded "
            "to bfloat16 if variables are bfloat16.",
        ),
    )


class Training:
    """Trainings of the README's language model on one core."""

    def __init__(self, quick: bool):
        size = dict(layers=1, d_model=32, batch=4, length=16) if quick else README
        self._size = {**size, "mesh_shape": "one:1", "layout": "", "scaled_embedding": True}
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Training:
        model = models.lm(**self._size)
        self._directory = self._exit.enter_context(tempfile.TemporaryDirectory())
        program, self._float32 = less_communication.program_of(model, models.FLOOR, 0)
        self._session = self._exit.enter_context(
            less_communication.session_of(program, self._float32)
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit.close()

    def run(self, way: Way, steps: int, seed: int) -> float:
        """Trains from a seed, and returns the loss on held-out text in nats."""

        def optimizer() -> Any:
            rate = tf.get_default_graph().get_tensor_by_name("rate:0")
            return gs.CrossShardOptimizer(gs.AdamWOptimizer(rate, 0.0, **way.arguments))

        model = models.lm(**self._size, dtype=way.dtype)._replace(make_optimizer=optimizer)
        program, built = less_communication.program_of(model, models.BARE, seed)
        rng = np.random.RandomState(seed)
        with less_communication.session_of(program, built) as session, built.graph.as_default():
            for step in range(steps):
                x = less_communication.batch_of("train", model.batch.shape, rng)
                feed = {built.x: x, "rate:0": less_communication.schedule(step, steps)}
                session.run([built.loss, built.update], feed)
            path = _as_float32(session.save(f"{self._directory}/trained"))
        self._session.restore(path)
        rng = np.random.RandomState(5)
        asked = [
            less_communication.batch_of("validation", model.batch.shape, rng)
            for _ in range(HELD_OUT)
        ]
        loss, x = self._float32.loss, self._float32.x
        return float(np.mean([self._session.run(loss, {x: batch}) for batch in asked]))


def _as_float32(path: str) -> str:
    """Writes a checkpoint's variables once more, in float32."""
    reader = tf.train.load_checkpoint(path)
    with tf.Graph().as_default(), tf.Session() as session:
        variables = [
            tf.get_variable(
                name, initializer=reader.get_tensor(name).astype("f"), use_resource=True
            )
            for name, dtype in reader.get_variable_to_dtype_map().items()
            if dtype.is_floating
        ]
        session.run(tf.global_variables_initializer())
        return tf.train.Saver(variables).save(session, f"{path}-float32")


def measure_cost(options: report.Options) -> report.Table:
    """Compiles a step of language models for TPUs, for each way that bfloat16 is kept."""
    rows: list[report.Row] = []
    targets: list[report.Target] = []
    names = [name for name, way in WAYS.items() if way.dtype is NARROW]
    for topology in options.only.get("topologies", TOPOLOGIES):
        size, seen = TOPOLOGIES[topology], {}
        if options.quick:
            size = size._replace(arguments={"layers": 1, "d_model": 32, "length": 16})
        for name in names:
            way = WAYS[name]
            model = models.lm(**size.arguments, dtype=way.dtype)
            program, fetches, _ = tpu_cost._program(model, tpu_cost._Step(way.optimizer))
            compiled = xla.compile_for_tpu(program, fetches, topology)
            if compiled.memory is None:
                raise RuntimeError(f"{topology} refuses {name}: {compiled.error}")
            cost = compiled.estimates["step"]
            row: report.Row = {
                "model": size.name,
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
            what = f"{name}, {size.name} on {topology}, us"
            targets.append(report.Target(what, seen[name]["us/nearest"], LIMIT))
        report.write(_cost_table(rows, targets), options)
    return _cost_table(rows, targets)


def _cost_table(rows: list[report.Row], targets: list[report.Target]) -> report.Table:
    return report.Table(
        name="rounding_cost",
        title="What the TPU compiler expects of a step in bfloat16",
        rows=rows,
        notes=(
            "These numbers are estimates of the TPU compiler. No step was timed.",
            'The "small lm" has 4 layers of width 128, as in other tables. "T5-base\'s width" is a '
            "language model with 2 layers of width 768, and 32 sequences of 512 tokens.",
            '"MB a core" is all memory of the core. For the small lm a large part of it is code '
            "and temporaries, so that slots in bfloat16 need not make it smaller.",
        ),
        targets=targets,
    )


if __name__ == "__main__":
    measures = [measure] + ([] if xla.why_no_tpu_compiler() else [measure_cost])
    parts = {"topologies": tuple(TOPOLOGIES), "ways": tuple(WAYS)}
    sys.exit(report.main(measures, "python -m benchmarks.rounding", parts, SETTINGS))
