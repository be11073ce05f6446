"""Where sums of gradients are kept: what the TPU compiler and the plan say of each place.

Models are the language model of configs/, and T5-base, by AdamW. `mtf-gradsync compile` compiles
each for 16 chips; the time of collectives is that of `mtf-gradsync plan`. T5-base is compiled with
two of its twelve layers, and its figures are multiplied by the ratio of parameters.
"""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import sys
import tempfile
from typing import Any, NamedTuple

import gin
import numpy as np

from benchmarks import models, report
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.tools.planning.machines import TpuMachine, bytes_sent
from mtf_gradsync.tools.train.cli import main as cli

TOPOLOGY = "v5e:4x4"
# Each place, without sharded updates and with them.
PLACES = ("local", "synced", "sharded")
UPDATES = " + sharded updates"
# By default, variables of which a part takes about as many of a TPU's tiles are not split.
ALL_SPLIT = f"sharded{UPDATES}, min_size=128"
STACKS = (*(f"{place}{more}" for more in ("", UPDATES) for place in PLACES), ALL_SPLIT)
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


class Model(NamedTuple):
    """A model to compile: its config, and what its figures are multiplied by."""

    config: str
    factor: float = 1.0


_VOCABULARY, _LAYER = 32_128 * 768, 12 * 768 * 768 + 4 * 768 * 3072  # parameters of T5-base
MODELS = {
    "LM": Model(LM),
    "T5-base": Model(T5_BASE, (_VOCABULARY + 12 * _LAYER) / (_VOCABULARY + 2 * _LAYER)),
}
MICROBATCHES = 4  # of lm_accumulate.gin


@gin.configurable(module="benchmarks")
def texts_and_answers(sequence_length: dict[str, int], vocabulary: Any, dataset_split: str) -> Any:
    """Returns a data set that has the features of an encoder and a decoder."""
    del vocabulary, dataset_split
    numbers = {name: np.ones((16, size), np.int32) for name, size in sequence_length.items()}
    return tf.data.Dataset.from_tensor_slices(numbers)


def measure(options: report.Options) -> report.Table:
    """Compiles each model with each stack."""
    rows = []
    for name in options.only.get("models", tuple(MODELS)):
        model = MODELS[name]
        for stack in options.only.get("stacks", STACKS):
            if stack == ALL_SPLIT and model.config == T5_BASE:  # its matrices are split anyway
                continue
            found = _figures("\n".join([model.config, *_bindings(stack)]))
            figures = {what: number * model.factor for what, number in found.items()}
            rows.append({"model": name, "sums": stack, **figures})
            print(rows[-1], file=sys.stderr, flush=True)
    return report.Table(
        name="sharded_sums",
        title=f"Sums of gradients over four microbatch steps, AdamW on {TOPOLOGY}",
        rows=rows,
        notes=(
            'All figures are MB or ms of one core. "kept" is what the core keeps from step to '
            'step: variables, Adam\'s slots and accumulated gradients. "memory" is all memory of '
            'the core, as the compiler plans it. "sent" is what the core sends to other '
            "replicas in rings.",
            '"ms" is the time that `mtf-gradsync plan` predicts from the compiled program, links '
            'included. "mean ms" is the mean of three microbatch steps without an update and one '
            "with an update.",
        ),
    )


def _bindings(stack: str) -> list[str]:
    place, _, updates = stack.partition(UPDATES)
    bindings = [f'GradientAccumulationOptimizer.accumulate = "{place}"']
    if UPDATES not in stack:
        bindings.append("GradientAccumulationOptimizer.opt = @AdamWOptimizer")
    if updates:
        bindings.append("ShardedUpdateOptimizer.min_size = 128")
    return bindings


def _figures(config: str) -> dict[str, float]:
    """What a core keeps and sends, and how long it takes, by the compiler's answer."""
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
        "memory, MB": compiled["memory"]["total"] / 1e6,
        "sent, MB": sent[0] / 1e6,
        "sent with update, MB": sent[1] / 1e6,
        "ms": seconds[0] * 1e3,
        "ms with update": seconds[1] * 1e3,
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
