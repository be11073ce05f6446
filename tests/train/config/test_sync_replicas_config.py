"""configs/lm_sync_replicas.gin, with the model made small and a replica that is skipped."""

import re

import gin
import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.train.errors import TrainingError
from tests.train.config import small_lm
from tests.train.conftest import REPORTS


@gin.configurable
def contributing(absent=(), steps=()):
    """Skips some of four replicas in some steps, counted from 0."""
    step = tf.train.get_global_step().read_value()
    now = tf.reduce_any(tf.equal(step, tf.constant(steps, step.dtype)))
    out = tf.constant([replica in absent for replica in range(4)])
    return tf.logical_not(tf.logical_and(now, out))


@pytest.fixture
def train(tmp_path):
    """Runs the config with more bindings; returns the last checkpoint's variables."""

    def call(steps, *bindings):
        small = "SyncReplicasOptimizer.contributes = @contributing()"
        mesh_shape = "batch:4;model:1"
        small_lm.train("lm_sync_replicas.gin", tmp_path, mesh_shape, steps, small, *bindings)
        return small_lm.variables(tmp_path)

    return call


def test_one_of_four_may_be_missing_and_is_shown(train, capsys):
    values = train(6, REPORTS, "contributing.absent = (1,)", "contributing.steps = (2, 3, 4)")
    error = capsys.readouterr().err
    shown = re.findall(
        r"^step (\d+)/6 .*update step (\d+)  made \[(.*)\]  dropped \[(.*)\]$", error, re.M
    )
    assert shown, error
    # An update in each step; the counts with the step that is shown.
    assert shown[-1] == ("6", "6", "6 3 6 6", "0 3 0 0")
    assert values["global_step"] == values["sync_replicas/update_step"] == 6
    np.testing.assert_array_equal(values["sync_replicas/made"].ravel(), [6, 3, 6, 6])
    np.testing.assert_array_equal(values["sync_replicas/dropped"].ravel(), [0, 3, 0, 0])


def test_two_missing_make_an_update_of_two_steps(train):
    values = train(6, "contributing.absent = (0, 3)", "contributing.steps = (2, 3, 4, 5)")
    # Two contributions in each of the last four steps, three or more for an update.
    assert values["sync_replicas/update_step"] == 2 + 2
    np.testing.assert_array_equal(values["sync_replicas/made"].ravel(), [2, 6, 6, 2])
    assert values["global_step"] == 6


def test_training_ends_instead_of_waiting(train):
    bindings = ["contributing.absent = (0, 1, 2, 3)", "contributing.steps = (2, 3, 4, 5, 6, 7)"]
    said = r"max_steps_without_update=2 .*: \[0, 1, 2, 3\]. The newest checkpoint is of step 0"
    with pytest.raises(TrainingError, match=said):
        train(8, "SyncReplicasOptimizer.max_steps_without_update = 2", *bindings)
