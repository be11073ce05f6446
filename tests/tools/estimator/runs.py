"""Runs of the digits' model by Estimators, and what they leave behind."""

import numpy as np
import pytest
from tensorflow.python.tpu import tpu_config

from mtf_gradsync import estimator, xla
from tests.tools.estimator import digits

EPS = np.finfo(np.float32).eps


# Sums of 64 products and of 16 examples, in any order, six times over; Adam keeps relative errors.
TOLERANCE = digits.STEPS * (64 + 16) * EPS


VARIABLES = ["hidden/kernel", "hidden/bias", "logits/kernel", "logits/bias"]


RUNTIMES = [
    "placement_mesh",
    "cpu_replicas",
    pytest.param("xla", marks=[pytest.mark.xla, pytest.mark.skipif(
        bool(xla.why_no_xla()), reason=xla.why_no_xla())]),
]  # fmt: skip


def tpu_run_config(model_dir, **settings):
    """As GPT-Neo's main has it."""
    return estimator.run_config(
        str(model_dir),
        digits.MESH,
        tpu_config.TPUConfig(
            iterations_per_loop=1,
            num_shards=digits.CORES,
            num_cores_per_replica=1,
            per_host_input_for_training=tpu_config.InputPipelineConfig.BROADCAST,
        ),
        **{
            "tf_random_seed": 1,
            "save_checkpoints_steps": None,
            "save_checkpoints_secs": None,
            "save_summary_steps": 1,
            **settings,
        },
    )


def ours(
    directory,
    optimizer="cross_shard",
    runtime="placement_mesh",
    fn=digits.with_loss_seen,
    keep=5,
    **settings,
):
    config = digits.config(keep_checkpoint_max=keep)
    return estimator.Estimator(
        fn, str(directory), config, {"optimizer": optimizer},
        runtime=runtime, num_cores=digits.CORES, **settings,
    )  # fmt: skip


def train(runs, steps=digits.STEPS, input_fn=digits.input_fn):
    """Trains; returns the losses."""
    losses = []
    runs.train(input_fn, hooks=[digits.seen(losses)], steps=steps)
    return losses
