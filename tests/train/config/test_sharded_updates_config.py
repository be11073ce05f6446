"""configs/lm_sharded_updates.gin, with the model made small."""

from pathlib import Path

import numpy as np

from mtf_gradsync.train import gin_files
from mtf_gradsync.train.evaluation import held_out
from mtf_gradsync.train.metrics.file import read_metrics
from mtf_gradsync.train.run import run

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = [
    "num_layers = 1",
    "d_model = 16",
    "d_ff = 32",
    "num_heads = 2",
    "d_kv = 8",
    "Unitransformer.max_length = 16",
    "train.run.sequence_length = 16",
    "train.run.eval_dataset_fn = None",
    "train.run.log_steps = 1",
    "train.run.mesh_shape = 'batch:2;model:2'",
    "train.run.mesh_devices = None",
    "train.run.train_steps = 4",
]


def losses(config, directory):
    gin_files.load([str(CONFIGS / config)], SMALL)
    run(gin_files.run_config(), str(directory), say=lambda line: None)
    rows = read_metrics(directory / held_out.METRICS_FILE)
    return [row["loss"] for row in rows if "loss" in row]


def test_trains_as_without_parts(tmp_path):
    parts = losses("lm_sharded_updates.gin", tmp_path / "parts")
    assert len(parts) == 4
    whole = losses("lm_cpu_mesh.gin", tmp_path / "whole")
    # Adafactor's means are rounded otherwise; a loss of 5 after 4 steps.
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
