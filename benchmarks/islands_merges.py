"""How islands' changes are averaged, weighted and sent: the loss on held-out text of each way.

All islands are sessions of one process that take turns, so that it is the arithmetic alone that
differs, on the same data.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, NamedTuple

import numpy as np

from benchmarks import islands_series, less_communication, models, report, timing
from mtf_gradsync import CrossShardOptimizer
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.tools.islands.changes import (
    Change,
    MergeSettings,
    encoded,
    make_outer_step,
    weight_of,
)

SETTINGS = {"merge_steps": 200}
INNER_STEPS, SEEDS = 10, (0, 1)
EQUAL, UNEQUAL = (8, 8, 8, 8), (8, 8, 2, 2)


class Way(NamedTuple):
    """How changes become versions, and how many sequences a step of each island has."""

    merge: str = "mean"
    weight: str = "tokens"
    form: str = "float32"
    rate: float = islands_series.OUTER_RATE
    batches: tuple[int, ...] = EQUAL


WAYS = [
    Way(),
    Way(rate=0.9),
    Way(merge="radial"),
    Way(merge="radial", rate=0.9),
    Way(form="int8"),
    Way(form="int4"),
    Way(batches=UNEQUAL),
    Way(batches=UNEQUAL, weight="tokens_per_step"),
    Way(batches=UNEQUAL, merge="radial"),
    Way(batches=UNEQUAL, merge="radial", weight="tokens_per_step"),
]


def measure(options: report.Options) -> report.Table:
    """Trains four islands in each way, from two seeds, and asks for the loss on held-out text."""
    steps = 20 if options.quick else int({**SETTINGS, **options.settings}["merge_steps"])
    seeds = SEEDS[:1] if options.quick else SEEDS
    built = {batch: _built(batch) for batch in {*EQUAL, *UNEQUAL}}
    made, parts = islands_series.program(islands_series.language_model(1, 64), models.FLOOR, 0)
    rng = np.random.RandomState(5)
    shape = (64, islands_series.LENGTH)
    asked = [less_communication.batch_of("validation", shape, rng) for _ in range(8)]
    rows: list[report.Row] = []
    with parts.graph.as_default(), made.session(parts.lowering) as session:
        for way in timing.progress(WAYS[:2] if options.quick else WAYS, "ways"):
            found = []
            for seed in seeds:
                session.write(_trained(way, steps, seed, built))
                losses = [session.run(parts.loss, {parts.x: x}) for x in asked]
                found.append(float(np.mean(losses)))
            row: report.Row = {"merge": way.merge, "weight": way.weight, "form": way.form}
            row["outer rate"] = way.rate
            row["sequences in a step"] = ", ".join(map(str, way.batches))
            row |= {f"held-out nats, seed {seed}": x for seed, x in zip(seeds, found)}
            rows.append({**row, "mean": float(np.mean(found))})
    return report.Table(
        name="islands_merges",
        title=f"How changes of four islands are merged, {steps} steps of each island",
        rows=rows,
        notes=[
            f"The language model of the table of islands, {INNER_STEPS} steps between versions, "
            f"Nesterov's momentum {islands_series.OUTER_MOMENTUM}; nobody is late.",
        ],
        targets=[],
    )


def _built(batch: int) -> Any:
    model = islands_series.language_model(1, batch)

    def optimizer() -> Any:
        inner = less_communication.Adam(learning_rate=islands_series.RATE)
        mesh: dict[str, Any] = {"mesh_shape": model.mesh_shape, "layout": model.layout}
        return CrossShardOptimizer(inner, **mesh)

    return islands_series.program(model._replace(make_optimizer=optimizer), models.BARE, 0)


def _trained(way: Way, steps: int, seed: int, built: Any) -> dict[str, np.ndarray]:
    """Returns the values of the last version."""
    step_of = MergeSettings(way.rate, islands_series.OUTER_MOMENTUM, merge=way.merge)
    with contextlib.ExitStack() as stack:
        sessions = []
        for batch in way.batches:
            made, parts = built[batch]
            with parts.graph.as_default():
                there = {v.op.name for v in tf.global_variables()}
                names = {v.op.name for v in tf.trainable_variables()} & there
                sessions.append(stack.enter_context(made.session(parts.lowering)))
        outer = {name: sessions[0].read(name) for name in names}
        rng = np.random.RandomState(100 + seed)
        outer = {k: v + 0.01 * rng.randn(*v.shape).astype(np.float32) for k, v in outer.items()}
        momenta: dict[str, np.ndarray] = {}
        residuals: list[dict[str, np.ndarray]] = [{} for _ in sessions]
        for first in range(0, steps, INNER_STEPS):
            changes = []
            for number, (session, batch) in enumerate(zip(sessions, way.batches)):
                session.write(outer)
                _, parts = built[batch]
                for step in range(first, first + INNER_STEPS):
                    _step(session, parts, batch, [seed, number, step], step)
                now = session.variables()
                change = {k: v - now[k] + residuals[number].get(k, 0.0) for k, v in outer.items()}
                _, residuals[number] = encoded(change, way.form)
                change = {k: v - residuals[number].get(k, 0.0) for k, v in change.items()}
                tokens = batch * islands_series.LENGTH * INNER_STEPS
                changes.append(Change(weight_of(tokens, INNER_STEPS, way.weight), 1.0, change))
            outer, momenta = make_outer_step(outer, momenta, iter(changes), step_of)
    return outer


def _step(session: Any, parts: Any, batch: int, seed: list[int], step: int) -> None:
    shape = (batch, islands_series.LENGTH)
    x = less_communication.batch_of("train", shape, np.random.RandomState(seed))
    warm = min(1.0, (step + 1) / islands_series.WARM_UP)
    rate = islands_series.RATE * warm * less_communication.bias_correction(step)
    session.run([parts.loss, parts.update], {parts.x: x, "rate:0": rate})


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.islands_merges", {}, SETTINGS))
