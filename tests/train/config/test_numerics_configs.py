"""configs/lm_float16.gin and configs/lm_noise_scale.gin, with the model made small."""

from pathlib import Path

import numpy as np
import pytest

from mtf_gradsync.train import gin_files
from mtf_gradsync.train.evaluation import held_out
from mtf_gradsync.train.metrics.file import read_metrics
from mtf_gradsync.train.run import run

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = [
    "num_layers = 1",
    "d_model = 32",
    "d_ff = 64",
    "num_heads = 2",
    "d_kv = 16",
    "train.run.eval_dataset_fn = None",
    "train.run.save_checkpoints_steps = 1000",
]
# The mean of a batch of so many tokens: gradients are small.
TOKENS = 2**24
FLOAT16 = [
    *SMALL,
    f"Unitransformer.loss_denominator = {TOKENS}",
    "train.run.log_steps = 5",
    "train.run.reports = False",
]


def rows(config, directory, *bindings):
    gin_files.load([str(CONFIGS / config)], list(bindings))
    run(gin_files.run_config(), str(directory), say=lambda line: None)
    return [row for row in read_metrics(directory / held_out.METRICS_FILE) if "loss" in row]


@pytest.mark.xla
def test_float16_trains_with_a_scale_and_not_without(tmp_path):
    steps = "train.run.train_steps = 100"
    scaled = rows("lm_float16.gin", tmp_path / "scaled", *FLOAT16, steps)
    plain = rows(
        "lm_cpu_mesh.gin",
        tmp_path / "plain",
        *FLOAT16,
        steps,
        'utils.get_variable_dtype.activation_dtype = "float16"',
    )
    nats = {
        name: np.mean([row["loss"] for row in found[-4:]]) * TOKENS / 2048
        for name, found in (("scaled", scaled), ("plain", plain))
    }
    # A guess by the frequencies of bytes has about 3.2, a uniform one 5.5.
    assert nats["scaled"] < 2.9
    assert nats["plain"] > 4


@pytest.mark.parametrize("runtime", ["placement_mesh", "xla"])
def test_noise_scale_is_shown_and_written(runtime, tmp_path, capsys):
    bindings = [
        "train.run.train_steps = 4",
        "train.run.log_steps = 1",
        "train.run.mesh_shape = 'batch:2;model:2'",
        f"train.run.runtime = {runtime!r}",
    ]
    found = rows("lm_noise_scale.gin", tmp_path, *SMALL, *bindings)
    assert all(np.isfinite(row["gradient_noise_scale"]) for row in found)
    error = capsys.readouterr().err
    assert "noise scale" in error
    assert "norms of shards [" in error


@pytest.mark.parametrize("runtime", ["placement_mesh", "xla"])
def test_what_was_left_out_is_told(runtime, tmp_path, capfd):
    bindings = [
        "train.run.train_steps = 2",
        "train.run.reports = False",
        "d_model = 16",
        "d_ff = 32",
        "train.run.mesh_shape = 'batch:2;model:2'",
        f"train.run.runtime = {runtime!r}",
        # A sum over all tokens: times 2^15 it is more than float16 holds.
        "Unitransformer.loss_denominator = 1.0",
    ]
    rows("lm_float16.gin", tmp_path, *SMALL, *bindings)
    error = capfd.readouterr().err
    assert "step left out, gradients that are not finite: transformer/" in error
    assert "left out 2" in error
