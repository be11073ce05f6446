"""configs/lm_float16.gin and configs/lm_noise_scale.gin, with the model made small."""

import numpy as np
import pytest

from mtf_gradsync.train.evaluation import held_out
from mtf_gradsync.train.metrics.file import read_metrics
from tests.train.config import small_lm

# The mean of a batch of so many tokens: gradients are small.
TOKENS, BATCH = 2**24, 32 * 64
FLOAT16 = [
    "d_model = 32",
    "d_ff = 64",
    "d_kv = 16",
    "Unitransformer.max_length = 64",
    "train.run.sequence_length = 64",
    "train.run.runtime = 'xla'",
    "train.run.log_steps = 5",
    f"Unitransformer.loss_denominator = {TOKENS}",
]


@pytest.mark.xla
def test_float16_trains_with_a_scale_and_not_without(tmp_path):
    narrow = "utils.get_variable_dtype.activation_dtype = 'float16'"
    nats = {}
    for name, config in (("scaled", "lm_float16.gin"), ("plain", "lm_cpu_mesh.gin")):
        directory = tmp_path / name
        small_lm.train(config, directory, "batch:2;model:1", 60, *FLOAT16, narrow)
        nats[name] = np.mean(small_lm.losses(directory)[-2:]) * TOKENS / BATCH
    # A guess by the frequencies of bytes has about 3.2, a uniform one 5.5.
    assert nats["scaled"] < 3.2
    assert nats["plain"] > 4


@pytest.mark.parametrize("runtime", ["placement_mesh", "xla"])
def test_noise_scale_is_shown_and_written(runtime, tmp_path, capsys):
    runtime = f"train.run.runtime = {runtime!r}"
    small_lm.train("lm_noise_scale.gin", tmp_path, "batch:2;model:2", 4, runtime)
    rows = [row for row in read_metrics(tmp_path / held_out.METRICS_FILE) if "loss" in row]
    assert len(rows) == 4
    assert all(np.isfinite(row["gradient_noise_scale"]) for row in rows)
    error = capsys.readouterr().err
    assert "noise scale" in error
    assert "norms of shards [" in error


@pytest.mark.parametrize("runtime", ["placement_mesh", "xla"])
def test_what_was_left_out_is_told(runtime, tmp_path, capfd):
    bindings = [
        f"train.run.runtime = {runtime!r}",
        # A sum over all tokens: times 2^15 it is more than float16 holds.
        "Unitransformer.loss_denominator = 1.0",
    ]
    small_lm.train("lm_float16.gin", tmp_path, "batch:2;model:2", 2, *bindings)
    error = capfd.readouterr().err
    assert "step left out, gradients that are not finite: transformer/" in error
    assert "left out 2" in error
