"""What `mtf-gradsync plan --best` chooses for known models, and how long it takes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import gin
import numpy as np

from benchmarks import models, report
from mtf_gradsync import xla
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.tools.train.cli import main as cli


@gin.configurable(module="benchmarks")
def random_tokens(sequence_length, vocabulary, dataset_split):
    """A data set of tokens that an encoder reads and a decoder writes, of the vocabulary's ids."""
    del dataset_split
    generator = np.random.RandomState(0)
    features = {
        name: generator.randint(2, vocabulary.vocab_size, (64, size)).astype(np.int32)
        for name, size in sequence_length.items()
    }
    return tf.data.Dataset.from_tensor_slices(features).repeat()


_COMMON = """
include "lm_cpu_mesh.gin"
train.run.train_dataset_fn = @random_tokens
utils.get_variable_dtype.activation_dtype = "bfloat16"
train.run.mesh_shape = "batch:1;model:1"
"""
_GPT2_SMALL = f"""{_COMMON}
num_layers = 12
d_model = 768
d_ff = 3072
num_heads = 12
d_kv = 64
Unitransformer.max_length = 1024
Unitransformer.vocab_divisor = 50304
train.run.sequence_length = {{"inputs": 1024, "targets": 1024}}
train.run.batch_size = 512
CrossShardOptimizer.opt = @AdamWOptimizer
"""
_T5_BASE = f"""{_COMMON}
num_layers = 12
{models.T5_BASE}train.run.sequence_length = {{"inputs": 512, "targets": 128}}
train.run.batch_size = 128
"""
_ONE_BILLION = f"""{_COMMON}
num_layers = 20
d_model = 2048
d_ff = 8192
num_heads = 16
d_kv = 128
Unitransformer.max_length = 1024
Unitransformer.vocab_divisor = 32128
train.run.sequence_length = {{"inputs": 1024, "targets": 1024}}
train.run.batch_size = 1024
CrossShardOptimizer.opt = @AdamWOptimizer
"""
# Name, config, chips, and bytes of a chip that the program may use.
MODELS = {
    "GPT-2 small": (_GPT2_SMALL, "v5e:256", 16e9),
    "T5-base": (_T5_BASE, "v5e:16", 16e9),
    "1.1B": (_ONE_BILLION, "v5e:256", 16e9),
}


def measure(options: report.Options) -> report.Table:
    """Finds and proves the best division of each model."""
    missing = xla.why_no_tpu_compiler()
    if missing:
        raise SystemExit(f"There is no compiler for TPUs here: {missing}")
    rows = []
    for name in options.only["models"]:
        config, chips, budget = MODELS[name]
        if options.quick:
            config, chips = f"{config}\nnum_layers = 1\nd_model = 64\n", "v5e:4"
        load, began, used = os.getloadavg()[0], time.monotonic(), _processor_seconds()
        with tempfile.TemporaryDirectory() as folder:
            gin_file, found = Path(folder, "model.gin"), Path(folder, "best.json")
            gin_file.write_text(config)
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                code = cli.main(
                    ["plan", "--best", f"--chips={chips}", f"--budget_bytes={budget}",
                     f"--gin_file={gin_file}", f"--json={found}"]
                )  # fmt: skip
            answer = json.loads(found.read_text())
        print(said.getvalue(), file=sys.stderr, flush=True)
        chosen, checked = answer["chosen"] or {}, answer["checked"] or {}
        rows.append(
            {
                "model": name,
                "chips": chips,
                "budget GB": budget / 1e9,
                "divisions": answer["divisions"],
                "mesh": chosen.get("mesh_shape"),
                "stack": answer["name"],
                "predicted ms": chosen and 1e3 * chosen["predicted"]["seconds"],
                "compiler ms": checked and 1e3 * checked["seconds"],
                "predicted GB": chosen and chosen["predicted"]["bytes_per_core"] / 1e9,
                "compiler GB": checked and checked["bytes_per_core"] / 1e9,
                "compiled": len(answer["tried"]) + bool(checked),
                "exit code": code,
                "seconds": time.monotonic() - began,
                "processor seconds": _processor_seconds() - used,
                "load": f"{load:.1f} to {os.getloadavg()[0]:.1f}",
            }
        )
    notes = (
        "The exit code 0 means that a division was found, and was proved on this machine, scaled "
        "down, to be the same training. The compiler's figures are those of two layers, multiplied "
        "by the prediction for all layers and divided by the prediction for two layers. *compiled* "
        "is the number of divisions that the compiler compiled. *processor seconds* is the CPU "
        "time of all processes of the command, on both CPU cores. *load* is the load of the "
        "machine before and after the command.",
    )
    return report.Table("best_division", "The best division of known models", rows, notes)


def _processor_seconds() -> float:
    return sum(os.times()[:4])  # of this process and of those that it waited for


if __name__ == "__main__":
    command = "python -m benchmarks.best_division"
    sys.exit(report.main([measure], command, {"models": tuple(MODELS)}))
