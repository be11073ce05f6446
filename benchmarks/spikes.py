"""What ten poisoned batches do to a training, with `skip_spikes`, with clipping, and without."""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable

import numpy as np

import mtf_gradsync as gs
from benchmarks import inner_optimizers, report, timing

SETTINGS = {"steps": 100, "seeds": 3, "batch": 16}
POISONED, RATE, NAME = 10, 0.003, "GradientAccumulationOptimizer"


def _skipping(of: Any, window: int = 64) -> Callable[[Any], Any]:
    def make(rate: Any) -> Any:
        fn = gs.skip_spikes(deviations=6.0, window=window, of=of)
        where = {"mesh_shape": "one:1", "layout": ""}
        inner = gs.AdamWOptimizer(rate)
        return gs.GradientAccumulationOptimizer(inner, 1, should_skip_update_fn=fn, **where)

    return make


def _clipping(rate: Any) -> Any:
    return gs.ClipByGlobalNormOptimizer(gs.AdamWOptimizer(rate), 1.0)


BOTH = ("norm", "loss")
# How steps are made, and whether there are poisoned batches.
WAYS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "no poisoned batches": (gs.AdamWOptimizer, False),
    "no poisoned batches, skip_spikes of both": (_skipping(BOTH), False),
    "poisoned": (gs.AdamWOptimizer, True),
    "poisoned, clipped to a norm of 1": (_clipping, True),
    "poisoned, skip_spikes of the norm": (_skipping("norm"), True),
    "poisoned, skip_spikes of the loss": (_skipping("loss"), True),
    "poisoned, skip_spikes of both": (_skipping(BOTH), True),
    "no poisoned batches, skip_spikes of both, window=16": (_skipping(BOTH, 16), False),
    "poisoned, skip_spikes of the norm, window=16": (_skipping("norm", 16), True),
    "poisoned, skip_spikes of the loss, window=16": (_skipping("loss", 16), True),
    "poisoned, skip_spikes of both, window=16": (_skipping(BOTH, 16), True),
}


def measure(options: report.Options) -> report.Table:
    """Trains in each way from several seeds."""
    settings = {**SETTINGS, **options.settings}
    steps = 40 if options.quick else int(settings["steps"])
    seeds = 1 if options.quick else int(settings["seeds"])
    rows: list[report.Row] = []
    training = inner_optimizers.Training(options)
    ways = {name: WAYS[name] for name in options.only.get("ways", WAYS)}
    for name, (make, is_poisoned) in timing.progress(list(ways.items()), "ways"):
        losses: list[float] = []
        skipped: list[int | None] = []
        note = functools.partial(_note_skipped, skipped)
        for seed in range(seeds):
            change = _poison(steps, seed) if is_poisoned else _as_it_is
            losses.append(training.run(make, RATE, steps, seed, change, note))
        row: report.Row = {"training": name, "held-out nats": float(np.mean(losses))}
        row["by seed"] = ", ".join(f"{loss:.3f}" for loss in losses)
        row["skipped"] = ", ".join(str(x) for x in skipped if x is not None)
        rows.append(row)
    return report.Table(
        name="spikes",
        title=f"Ten poisoned batches, the README's language model, {steps} steps of AdamW",
        rows=rows,
        notes=(
            f"The model has 2 layers of width 128, and batches of {settings['batch']} sequences of "
            "64 bytes. Each sequence of a poisoned batch repeats one random byte. The first "
            "poisoned batch is in the second quarter of the training.",
            "Steps are skipped by skip_spikes(deviations=6, window=64), but where a row names "
            'another window. "skipped" is the number of skipped steps for each seed.',
        ),
    )


def _poison(steps: int, seed: int) -> Callable[[int, np.ndarray], np.ndarray]:
    """Returns a function that replaces the batches of some steps."""
    rng = np.random.RandomState(100 + seed)
    at = set(rng.choice(np.arange(steps // 4, steps), POISONED, replace=False))

    def change(step: int, batch: np.ndarray) -> np.ndarray:
        if step not in at:
            return batch
        return np.broadcast_to(rng.randint(128, 256, (len(batch), 1)), batch.shape).astype("i")

    return change


def _as_it_is(step: int, batch: np.ndarray) -> np.ndarray:
    del step
    return batch


def _note_skipped(skipped: list[int | None], session: Any) -> None:
    found = session.variables().get(f"{NAME}/skipped")
    skipped.append(None if found is None else int(found))


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.spikes", {"ways": tuple(WAYS)}, SETTINGS))
