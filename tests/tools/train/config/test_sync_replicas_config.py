"""configs/lm_sync_replicas.gin, with the model made small and a replica that is skipped."""

import re

import gin
import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes._common import TrainingError
from tests.sessions import saved_variables
from tests.tools.train.config import small_lm
from tests.tools.train.conftest import REPORTS

pytestmark = pytest.mark.slow


@gin.configurable
def contributing(absent):
    """Skips some of four replicas in each step; the last step's for those that follow."""
    step = tf.train.get_global_step().read_value()
    rows = tf.constant([[replica not in out for replica in range(4)] for out in absent])
    return rows[tf.minimum(step, len(absent) - 1)]


@pytest.fixture
def train(tmp_path):
    """Runs the config with more bindings; returns the last checkpoint's variables."""

    def call(steps, *bindings, absent):
        skipped = [
            "SyncReplicasOptimizer.contributes = @contributing()",
            f"contributing.absent = {absent}",
        ]
        mesh_shape = "batch:4;model:1"
        small_lm.train("lm_sync_replicas.gin", tmp_path, mesh_shape, steps, *skipped, *bindings)
        return saved_variables(tmp_path)

    return call


def test_one_of_four_may_be_missing_and_two_make_an_update_of_two_steps(train, tmp_path, capsys):
    absent = [(), (), (1,), (1,), (1,), *[(0, 3)] * 4]
    values = train(9, REPORTS, "train.run.save_checkpoints_steps = 5", absent=absent)
    error = capsys.readouterr().err
    shown = re.findall(
        r"^step (\d+)/9 .*update step (\d+)  made \[(.*)\]  dropped \[(.*)\]$", error, re.M
    )
    assert shown, error
    # The counts with the step that is shown.
    assert shown[-1] == ("9", "7", "5 6 9 5", "4 3 0 4")
    before = saved_variables(tmp_path / "model.ckpt-5")
    # An update in each step.
    assert before["global_step"] == before["sync_replicas/update_step"] == 5
    np.testing.assert_array_equal(before["sync_replicas/made"].ravel(), [5, 2, 5, 5])
    np.testing.assert_array_equal(before["sync_replicas/dropped"].ravel(), [0, 3, 0, 0])
    # Two contributions in each of the last four steps, three or more for an update.
    assert values["sync_replicas/update_step"] == 5 + 2
    np.testing.assert_array_equal(values["sync_replicas/made"].ravel(), [5, 6, 9, 5])
    assert values["global_step"] == 9


def test_training_ends_instead_of_waiting(train):
    said = r"max_steps_without_update=2 .*: \[0, 1, 2, 3\]. There is no checkpoint yet"
    with pytest.raises(TrainingError, match=said):
        train(
            8,
            "SyncReplicasOptimizer.max_steps_without_update = 2",
            absent=[(), (), (0, 1, 2, 3)],
        )
