"""Muon beside AdamW and Adafactor: held-out loss at equal steps, and what a TPU would pay."""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, NamedTuple

import numpy as np

import mtf_gradsync as gs
from benchmarks import less_communication, models, report, timing, tpu_cost
from mtf_gradsync import xla
from mtf_gradsync._private.libraries import mtf, tf

SETTINGS = {"steps": 250, "seeds": 3, "batch": 32}
TOPOLOGIES = ("v5e:2x4",)
WARM_UP = 20
# A width, layers, a batch and a length; the second is one layer of GPT-2 small's size.
SIZES = {
    "LM of the README": {"layers": 2, "d_model": 128, "batch": 32, "length": 64},
    "GPT-2 layer": {"layers": 1, "d_model": 768, "batch": 8, "length": 512},
}


class Inner(NamedTuple):
    """An optimizer, and the rates that it is tried with.

    Attributes:
      make: makes it from a rate.
      rates: the rates at their highest.
    """

    make: Callable[[Any], Any]
    rates: tuple[float, ...]


def _muon(rate: Any) -> Any:
    # The rest by AdamW, a tenth of Muon's rate.
    rest = gs.AdamWOptimizer(rate * 0.1)
    return gs.ByVariable(rest, [(gs.is_hidden_matrix, gs.MuonOptimizer(rate))])


OPTIMIZERS = {
    "AdamW": Inner(gs.AdamWOptimizer, (0.001, 0.003, 0.01)),
    "Adafactor": Inner(
        lambda rate: mtf.optimize.AdafactorOptimizer(learning_rate=rate, decay_rate=0.98),
        (0.02, 0.05),
    ),
    "Muon, the rest by AdamW": Inner(_muon, (0.02, 0.05)),
}


def measure(options: report.Options) -> report.Table:
    """Trains by each optimizer from several seeds, by each rate from one, and asks for the loss."""
    settings = {**SETTINGS, **options.settings}
    steps = 10 if options.quick else int(settings["steps"])
    seeds = 1 if options.quick else int(settings["seeds"])
    rows: list[report.Row] = []
    chosen, training = options.only.get("optimizers", OPTIMIZERS), Training(options)
    for name in timing.progress(list(chosen), "optimizers"):
        make, rates = OPTIMIZERS[name]
        tried = rates[: 1 if options.quick else None]
        first = {rate: training.run(make, rate, steps, 0) for rate in tried}
        best = min(tried, key=first.__getitem__)
        losses = [first[best], *(training.run(make, best, steps, s) for s in range(1, seeds))]
        rows.append(
            {
                "optimizer": name,
                "rate": best,
                "held-out nats": float(np.mean(losses)),
                "by seed": ", ".join(f"{loss:.3f}" for loss in losses),
                "other rates": ", ".join(f"{r:g}: {x:.3f}" for r, x in first.items() if r != best),
            }
        )
        table = _table(rows, steps, settings["batch"])
        report.write(table, options)
    return table


def _table(rows: list[report.Row], steps: int, batch: Any) -> report.Table:
    return report.Table(
        name="inner_optimizers",
        title=f"Optimizers of the README's language model, {steps} steps by each optimizer",
        rows=rows,
        notes=(
            f"The model has 2 layers of width 128, and batches of {batch} sequences of 64 bytes."
            f' "rate" is the learning rate after {WARM_UP} steps of warm-up. Over the second half'
            " of the training the rate falls to 0.",
            "Embeddings begin like the weights of a classifier. Adafactor has a decay rate of"
            " 0.98.",
        ),
    )


class Training:
    """Trainings of the README's language model on one core."""

    def __init__(self, options: report.Options):
        batch = int({**SETTINGS, **options.settings}["batch"])
        size = {"layers": 1, "d_model": 32, "length": 16} if options.quick else {"layers": 2}
        self._model = models.lm(
            batch=batch, mesh_shape="one:1", layout="", scaled_embedding=True, **size
        )
        # Open until the process ends.
        self._opened = less_communication.held_out_loss_of(self._model)
        self._held_out_loss = self._opened.__enter__()

    def run(
        self,
        make: Callable[[Any], Any],
        rate: float,
        steps: int,
        seed: int,
        change: Callable[[int, np.ndarray], np.ndarray] = lambda step, batch: batch,
        end: Callable[[Any], None] = lambda session: None,
    ) -> float:
        """Trains, and returns the loss on held-out text, in nats for each byte.

        Args:
          make: makes the optimizer from a learning rate.
          rate: the rate between warm-up and decay.
          steps: how many steps.
          seed: of variables and batches.
          change: returns the batch of a step, from the one that is drawn.
          end: is called with the session after the last step.
        """

        def optimizer() -> Any:
            factor = tf.get_default_graph().get_tensor_by_name("rate:0")
            return make(factor * rate)

        model = self._model._replace(make_optimizer=optimizer)
        program, built = less_communication.program_of(model, models.BARE, seed)
        rng = np.random.RandomState(seed)
        with less_communication.session_of(program, built) as session:
            for step in range(steps):
                batch = less_communication.batch_of("train", model.batch.shape, rng)
                factor = min(1.0, (step + 1) / WARM_UP, 2.0 * (1.0 - step / steps))
                with built.graph.as_default():
                    feed = {built.x: change(step, batch), "rate:0": factor}
                    session.run([built.loss, built.update], feed)
            end(session)
            return self._held_out_loss(session)


def measure_cost(options: report.Options) -> report.Table:
    """Compiles a step by each optimizer for every topology; nothing is run."""
    missing = xla.why_no_tpu_compiler()
    if missing:
        raise SystemExit(f"There is no compiler for TPUs here: {missing}")
    rows: list[report.Row] = []
    sizes = {"tiny": {"layers": 1, "d_model": 32, "length": 16}} if options.quick else SIZES
    for topology in options.only.get("topologies", TOPOLOGIES):
        for name, size in sizes.items():
            of_model: list[report.Row] = []
            for optimizer, (make, rates) in OPTIMIZERS.items():
                make_optimizer = functools.partial(make, rates[0])
                model = models.lm(**size)._replace(make_optimizer=make_optimizer)
                (row,) = tpu_cost.rows_of(model, name, "CrossShard", topology)
                kept = ("us", "MB touched", "MB a core", "all-reduces", "all-gathers")
                of_model.append(
                    {
                        "model": name,
                        "topology": topology,
                        "optimizer": optimizer,
                        **{key: row[key] for key in kept},
                        "us/AdamW": row["us"] / (of_model[0]["us"] if of_model else row["us"]),
                    }
                )
            rows += of_model
            report.write(_cost_table(rows), options)
    return _cost_table(rows)


def _cost_table(rows: list[report.Row]) -> report.Table:
    return report.Table(
        "inner_optimizers_cost",
        "What the TPU compiler expects of a step by each optimizer",
        rows,
        notes=(
            "The times are estimates of the TPU compiler, as in the tables of benchmarks.tpu_cost. "
            "Each optimizer is inside a CrossShardOptimizer, on a mesh of 4x2: the batch is split "
            "over four cores, and heads, d_ff and the vocabulary over two cores.",
        ),
    )


if __name__ == "__main__":
    parts = {"optimizers": tuple(OPTIMIZERS), "topologies": TOPOLOGIES}
    command = "python -m benchmarks.inner_optimizers"
    sys.exit(report.main([measure_cost, measure], command, parts, SETTINGS))
