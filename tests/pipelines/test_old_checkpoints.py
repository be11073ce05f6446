"""Who has trained for weeks can add a wrapper, take it away, or change the mesh.

Under the pipelines' own plain savers, and by nothing but another optimizer or mesh.
"""

import functools
import shutil

import numpy as np
import pytest

from mtf_gradsync import estimator
from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE, tf
from tests.sessions import saved_variables
from tests.tools.estimator import by_hand, digits
from tests.tools.estimator.runs import tpu_run_config, train

# isort: split
from tensorflow.python.tpu import tpu_estimator

MADE, K = 3, 2
PLACES = {"rows:2;cols:2": 2, "rows:4;cols:1": 4, "rows:1;cols:2": 1}


def begin(directory, optimizer, mesh=digits.MESH, pipeline=estimator.Estimator):
    """A program that was written for TPUEstimator; it makes a plain tf.train.Saver."""
    params = {
        "optimizer": optimizer,
        "model_path": str(directory),
        "steps_per_checkpoint": 100,
        "mesh_shape": mesh,
    }
    return pipeline(
        model_fn=by_hand.model_fn, use_tpu=False, config=tpu_run_config(directory),
        train_batch_size=digits.BATCH, eval_batch_size=digits.BATCH, params=params,
    )  # fmt: skip


def go_on(directory, *args, steps=2):
    """Goes on after `MADE` steps; returns the losses, and what was restored."""
    losses = train(begin(directory, *args), steps, lambda params: digits.skipping(MADE)("train"))
    return losses, saved_variables(directory / f"model.ckpt-{MADE}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Directories with a checkpoint after three steps, by optimizer."""
    made = {}

    def directory(optimizer):
        if optimizer not in made:
            made[optimizer] = tmp_path_factory.mktemp(optimizer)
            train(begin(made[optimizer], optimizer), MADE, lambda params: digits.input_fn("train"))
        return made[optimizer]

    return directory


@pytest.fixture(scope="module")
def continued(trained, tmp_path_factory):
    """Losses of a run that goes on on the same mesh, by optimizers before and after."""

    def losses(before, after):
        folder = tmp_path_factory.mktemp("continued")
        shutil.copytree(trained(before), folder, dirs_exist_ok=True)
        return go_on(folder, after)[0]

    return functools.lru_cache(maxsize=None)(losses)


def in_pipelines(ours, tpu):
    """Parameters (pipeline, case), one case in each pipeline."""
    skip = pytest.mark.skipif(not ESTIMATOR_AVAILABLE, reason="this TensorFlow has no TPUEstimator")
    theirs = getattr(tpu_estimator, "TPUEstimator", None)
    return [(estimator.Estimator, ours), pytest.param(theirs, tpu, marks=skip)]


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "optimizer"), in_pipelines("averaged", "local"))
def test_a_wrapper_is_added(pipeline, optimizer, trained, continued, tmp_path):
    old = saved_variables(trained("bare"))
    shutil.copytree(trained("bare"), tmp_path, dirs_exist_ok=True)
    losses, restored = go_on(tmp_path, optimizer, digits.MESH, pipeline)
    for name, value in old.items():
        np.testing.assert_array_equal(restored[name], value, err_msg=name)
    new = {name: value for name, value in restored.items() if name not in old}
    assert new
    for name, value in new.items():
        if name.endswith("ExponentialMovingAverage"):
            wanted = old[name.rpartition("/")[0]]
        else:
            # Every step of the bare run was an update.
            wanted = MADE if name.endswith(("update_step", "local_step")) else 0
        np.testing.assert_array_equal(value, np.broadcast_to(wanted, value.shape), err_msg=name)
    assert losses[0] == continued("bare", "cross_shard")[0]


@pytest.mark.slow
def test_a_wrapper_is_taken_away(trained, tmp_path):
    old = saved_variables(trained("local"))
    shutil.copytree(trained("local"), tmp_path, dirs_exist_ok=True)
    _, restored = go_on(tmp_path, "bare")
    assert {"hidden/kernel", "hidden/kernel/adam_m"} < set(restored) < set(old)
    for name, value in restored.items():
        np.testing.assert_array_equal(value, old[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "mesh"), in_pipelines("rows:1;cols:2", "rows:4;cols:1"))
def test_the_mesh_changes_in_mid_accumulation(pipeline, mesh, trained, continued, tmp_path):
    old = saved_variables(trained("local"))
    assert old["hidden/kernel/gradient_accumulator"].shape == (2, 64, 8)
    shutil.copytree(trained("local"), tmp_path, dirs_exist_ok=True)
    losses, restored = go_on(tmp_path, "local", mesh, pipeline)
    shape = restored["hidden/kernel/gradient_accumulator"].shape
    assert shape == (PLACES[mesh], 64, 8)
    for name, value in old.items():
        if name.endswith("gradient_accumulator"):
            # Sums of two, which no order changes, or copies.
            np.testing.assert_array_equal(restored[name].sum(0), value.sum(0), err_msg=name)
        else:
            np.testing.assert_array_equal(restored[name], value, err_msg=name)
    same = continued("local", "local")
    # Sums of 64 products and 16 examples in another order, in each of three steps; Adam keeps
    # relative errors.
    np.testing.assert_allclose(losses, same, rtol=3 * 64 * 16 * np.finfo(np.float32).eps)


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_still_refused(trained, tmp_path):
    shutil.copytree(trained("bare"), tmp_path, dirs_exist_ok=True)
    with pytest.raises(tf.errors.NotFoundError, match="momentum"):
        go_on(tmp_path, "momentum")
