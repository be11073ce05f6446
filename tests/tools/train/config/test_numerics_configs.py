"""configs/lm_float16.gin and configs/lm_noise_scale.gin, with the model made small."""

import re

import gin
import numpy as np
import pytest

from tests.sessions import saved_variables
from tests.tools.train.config import small_lm
from tests.tools.train.conftest import ATTENTION, metric

STEPS = 3
# The configs' warm-up begins with a rate of 0.
CONSTANT_RATE = "train.run.learning_rate_schedule = 0.03"
# The smallest number of float16 is 2^-24: divided by so many tokens, gradients are no larger.
TINY_GRADIENTS = f"Unitransformer.loss_denominator = {2.0**24}"
# Of float16, one behind the other, through a model of one layer and back, and in three updates.
ROUNDINGS = 64
EPS = 2.0**-11


def way(directory):
    """How far all weights, as one vector, have moved from a run's first checkpoint to its last."""
    first, last = (saved_variables(directory / f"model.ckpt-{step}") for step in (1, STEPS))
    weights = [name for name in sorted(first) if re.match("transformer/(?!.*slot)", name)]
    return np.concatenate([(last[name] - first[name]).ravel() for name in weights])


@pytest.mark.slow
@pytest.mark.xla
def test_float16_trains_with_a_scale_and_not_without(tmp_path):
    """With a scale the weights go where float32 takes them, without it anywhere else."""
    narrow = "utils.get_variable_dtype.activation_dtype = 'float16'"
    bindings = [TINY_GRADIENTS, "train.run.save_checkpoints_steps = 1", CONSTANT_RATE, ATTENTION]
    ways = {}
    for name, config, *more in (
        ("float32", "lm_cpu_mesh.gin"),
        ("plain", "lm_cpu_mesh.gin", narrow),
        # On XLA devices, whose float16 is another implementation.
        ("scaled", "lm_float16.gin", "train.run.runtime = 'xla'"),
    ):
        small_lm.train(config, tmp_path / name, "batch:2;model:1", STEPS, *bindings, *more)
        ways[name] = way(tmp_path / name)
        gin.clear_config()
    apart = {name: np.linalg.norm(moved - ways["float32"]) for name, moved in ways.items()}
    length = np.linalg.norm(ways["float32"])
    # About 0.006 and 1 of the way.
    assert apart["scaled"] < ROUNDINGS * EPS * length
    assert apart["plain"] > 0.5 * length


@pytest.mark.slow
@pytest.mark.parametrize(("runtime", "model"), [("placement_mesh", 2), ("xla", 1)])
def test_noise_scale_is_shown_and_written(runtime, model, tmp_path, capsys):
    runtime = f"train.run.runtime = {runtime!r}"
    small_lm.train("lm_noise_scale.gin", tmp_path, f"batch:2;model:{model}", 4, runtime)
    scales = metric(tmp_path, "gradient_noise_scale")
    assert len(scales) == 4
    assert np.isfinite([*scales.values()]).all()
    error = capsys.readouterr().err
    assert "noise scale" in error
    assert "norms of shards [" in error


@pytest.mark.parametrize("runtime", ["placement_mesh", "xla"])
@pytest.mark.slow
def test_skipped_steps_are_logged(runtime, tmp_path, capfd, caplog):
    bindings = [
        f"train.run.runtime = {runtime!r}",
        # A sum over all tokens: times 2^15 it is more than float16 holds.
        "Unitransformer.loss_denominator = 1.0",
    ]
    small_lm.train("lm_float16.gin", tmp_path, "batch:2;model:1", 2, *bindings)
    # A placement mesh prints by itself; the session on XLA devices logs.
    error = capfd.readouterr().err + caplog.text
    assert "step skipped, gradients that are not finite: transformer/" in error
    assert "skipped 2" in error
