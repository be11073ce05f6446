"""Where sums of gradients are kept: what the TPU compiler and the plan say of each place.

Models are the language model of configs/, and two of the twelve layers of T5-base's encoder and
decoder, by AdamW. `mtf-gradsync compile` compiles each for 16 chips; the time of collectives is
that of `mtf-gradsync plan`.
"""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import sys
import tempfile
from typing import Any

import gin
import numpy as np

from benchmarks import models, report
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.tools.planning.machines import TpuMachine, bytes_sent
from mtf_gradsync.tools.train.cli import main as cli

TOPOLOGY = "v5e:4x4"
# Each place, without sharded updates and with them.
PLACES = ("local", "synced", "sharded")
STACKS = tuple(f"{place}{more}" for more in ("", " + sharded updates") for place in PLACES)
LM = """
include "lm_sharded_sums.gin"
mesh_shape = "batch:16;model:1"
train.run.batch_size = 16
"""
T5_BASE = f"""
include "lm_sharded_sums.gin"
mesh_shape = "batch:16"
num_layers = 2
{models.T5_BASE}
train.run.batch_size = 16
train.run.sequence_length = {{"inputs": 128, "targets": 32}}
train.run.train_dataset_fn = @texts_and_answers
"""
MODELS = {"LM": LM, "T5-base": T5_BASE}
MICROBATCHES = 4  # of lm_accumulate.gin


@gin.configurable(module="benchmarks")
def texts_and_answers(sequence_length: dict[str, int], vocabulary: Any, dataset_split: str) -> Any:
    """Returns a data set that has the features of an encoder and a decoder."""
    del vocabulary, dataset_split
    numbers = {name: np.ones((16, size), np.int32) for name, size in sequence_length.items()}
    return tf.data.Dataset.from_tensor_slices(numbers)


def measure(options: report.Options) -> report.Table:
    """Plans and compiles each model with each stack."""
    rows = []
    for model in options.only["models"]:
        for stack in options.only["stacks"]:
            place, _, updates = stack.partition(" + ")
            bindings = [f'GradientAccumulationOptimizer.accumulate = "{place}"']
            if not updates:
                bindings.append("GradientAccumulationOptimizer.opt = @AdamWOptimizer")
            rows.append(
                {"model": model, "stack": stack, **_row("\n".join([MODELS[model], *bindings]))}
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return report.Table(
        name="sharded_sums",
        title=f"Sums of gradients over four microbatch steps, AdamW, {TOPOLOGY}",
        rows=rows,
        notes=(
            "kept: from step to step on a core: variables, Adam's slots, sums. core: all memory, "
            "as the compiler plans it. sent: by a core between replicas, around a ring.",
            "ms: as `mtf-gradsync plan` predicts, links included; mean: over three microbatch "
            "steps without an update and one with it.",
        ),
    )


def _row(config: str) -> report.Row:
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "model.gin"
        file.write_text(config, encoding="utf-8")
        out = file.with_suffix(".json")
        arguments = [f"--gin_file={file}", f"--topology={TOPOLOGY}", f"--json={out}"]
        with contextlib.redirect_stdout(io.StringIO()):
            code = cli.main(["compile", *arguments])
        if code:
            raise RuntimeError(f"mtf-gradsync compile ended with {code} for {config}")
        compiled = json.loads(out.read_text(encoding="utf-8"))
    machine = TpuMachine(TOPOLOGY)
    sent, seconds = [], []
    for collectives, condition in (
        ("of_skipped_step", "conditions_false"),
        ("of_update", "conditions_true"),
    ):
        step = [(x["operation"], x["groups"], x["bytes_per_core"]) for x in compiled[collectives]]
        sent.append(sum(bytes_sent(what, len(groups[0]), size) for what, groups, size in step))
        links = sum(machine.seconds(*one) for one in step)
        seconds.append(compiled["estimates"][condition]["seconds"] + links)
    mean = (seconds[0] * (MICROBATCHES - 1) + seconds[1]) / MICROBATCHES
    return {
        "kept, MB": compiled["memory"]["arguments"] / 1e6,
        "core, MB": compiled["memory"]["total"] / 1e6,
        "sent, MB": sent[0] / 1e6,
        "with update, MB": sent[1] / 1e6,
        "step ms": seconds[0] * 1e3,
        "with update, ms": seconds[1] * 1e3,
        "mean ms": mean * 1e3,
    }


if __name__ == "__main__":
    sys.exit(
        report.main(
            [measure],
            "python -m benchmarks.sharded_sums",
            {"models": tuple(MODELS), "stacks": STACKS},
        )
    )
