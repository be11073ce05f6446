"""configs/lm_accumulate.gin, with the model made small."""

import re

import numpy as np
import pytest

from tests.sessions import saved_variables
from tests.tools.train.config import small_lm
from tests.tools.train.config.small_lm import losses
from tests.tools.train.conftest import REPORTS

K = 4  # as in the config
KEEP_ALL = "train.run.keep_checkpoint_max = None"


@pytest.fixture
def train(tmp_path):
    """Runs the config with more bindings; returns what the run left."""

    def call(steps, *bindings, model_dir="run", mesh_shape="batch:2;model:1"):
        directory = tmp_path / model_dir
        small_lm.train("lm_accumulate.gin", directory, mesh_shape, steps, *bindings)
        return directory

    return call


@pytest.mark.slow
def test_shows_micro_and_update_step_and_moves_variables_with_updates_only(train, capsys):
    directory = train(2 * K + 2, REPORTS, "train.run.save_checkpoints_steps = 1", KEEP_ALL)
    error = capsys.readouterr().err
    shown = re.findall(r"^step (\d+)/10 .*microbatch step (\d+)  update step (\d+)$", error, re.M)
    assert shown, error
    values = saved_variables(directory)
    assert values["global_step"] == 2 * K + 2
    assert values["GradientAccumulationOptimizer/mini_step"] == 2
    assert values["GradientAccumulationOptimizer/update_step"] == 2
    # The counters with the step that is shown.
    assert shown[-1] == ("10", "2", "2")

    steps = [saved_variables(f"{directory}/model.ckpt-{step}") for step in range(1, 2 * K + 1)]
    weights = [
        name for name in steps[0]
        if name.startswith("transformer") and "slot" not in name and "accumulator" not in name
    ]  # fmt: skip
    assert weights
    # The warm-up's first rate is 0, so that only the second update moves the weights.
    for name in weights:
        for step in steps[1:-1]:
            np.testing.assert_array_equal(step[name], steps[0][name], err_msg=name)
    assert any(np.any(steps[-1][name] != steps[0][name]) for name in weights)


@pytest.mark.slow
def test_a_run_goes_on_in_mid_accumulation_on_another_mesh(train):
    whole = losses(train(3 * K, model_dir="whole"))
    train(K + 2, model_dir="parts")
    parts = losses(train(3 * K, model_dir="parts", mesh_shape="batch:4;model:1"))
    assert len(parts) == len(whole) == 3 * K
    # Another mesh adds up in another order.
    np.testing.assert_allclose(parts, whole, rtol=1e-4)
