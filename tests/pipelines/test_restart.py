"""Accumulation and synchronous replicas across restarts."""

import itertools
import os
import re
import signal

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.optimizers.state import STAND_INS
from tests import harness, models
from tests.pipelines import restart_program
from tests.pipelines.restart_program import CONTRIBUTES, LAYOUT, MESH, K
from tests.runtimes.cluster.processes import Processes
from tests.sessions import assert_same_bits, ran, saved_variables


def killed_runs(wrapper, folder, numbers):
    """Kills each run when it has saved after some steps, in the middle of others.

    A run of all steps that is not killed is in `folder / "whole"` then.

    Yields:
      How many steps are made in all, and the checkpoint's variables.
    """
    with Processes() as processes:
        directories = folder / "whole", folder / "parts"
        program = processes.fork("-m", restart_program.__name__, wrapper, *directories, *numbers)
        for end in itertools.accumulate(numbers):
            processes.wait_for(program, f"saved {end} by ")
            pid = re.search(rf"^saved {end} by (\d+)$", program.output(), re.M).group(1)
            os.kill(int(pid), signal.SIGKILL)
            yield end, saved_variables(folder / "parts")
        processes.wait(program)


@pytest.mark.slow
def test_killed_after_each_micro_step_of_two_updates_ends_in_the_same_bits(tmp_path):
    runs = killed_runs("accumulation", tmp_path, [1] * 2 * K)
    for step, actual in runs:
        assert actual["GradientAccumulationOptimizer/mini_step"] == step % K
        assert actual["GradientAccumulationOptimizer/update_step"] == step // K
        # Nothing of this test would fail if sums were never kept.
        assert np.any(actual["w1/gradient_accumulator"]) == (step % K > 0)
    expected = saved_variables(tmp_path / "whole")
    assert step == expected["global_step"] == 2 * K
    assert_same_bits(actual, expected)


@pytest.mark.slow
def test_replicas_killed_between_updates_end_in_the_same_bits(tmp_path):
    # After one step one replica's contribution is pending, after two both, after four the
    # other's alone; the last run goes on for two steps, with an update.
    runs = killed_runs("sync_replicas", tmp_path, [1, 1, 2, 2])
    expected_counts = {1: (1, 0), 2: (2, 0), 4: (1, 1), 6: (0, 2)}
    for end, actual in runs:
        count, updates = expected_counts[end]
        assert actual["sync_replicas/count"] == count
        assert actual["global_step"] == actual["sync_replicas/update_step"] == updates
        made = CONTRIBUTES[:end].sum(0)
        np.testing.assert_array_equal(actual["sync_replicas/made"], made)
        np.testing.assert_array_equal(actual["sync_replicas/dropped"], end - made)
        sums = actual["w1/gradient_accumulator"].reshape(2, -1)
        pending = {1: [True, False], 2: [True, True], 4: [False, True], 6: [False, False]}[end]
        assert list(np.any(sums, axis=1)) == pending
    assert end == len(CONTRIBUTES)
    expected = saved_variables(tmp_path / "whole")
    assert_same_bits(actual, expected)
    assert np.any(expected["w1/ExponentialMovingAverage"] != expected["w1"])


PASSES = 3


def program(place):
    """The model, with sums that no checkpoint holds."""
    mesh_args = dict(mesh_shape=MESH, layout=LAYOUT) if place == "local" else {}

    def make():
        return gs.GradientAccumulationOptimizer(
            models.OPTIMIZERS["adam"](), PASSES, checkpoint_accumulators=False, **mesh_args
        )

    (feed,) = models.mlp_batches(1)
    return harness.built("placement", MESH, LAYOUT, models.train(make), feed)


@pytest.mark.parametrize("place", ["local", "synced"])
@pytest.mark.slow
def test_without_checkpointed_sums_a_restart_begins_a_fresh_accumulation(tmp_path, place):
    feeds, made = models.mlp_batches(2 * PASSES), program(place)
    path = str(tmp_path / "model.ckpt")

    def saved(feeds, restore=None):
        ran(made, feeds, restore, path, tf.train.Saver)
        return saved_variables(path)

    saved(feeds[: PASSES + 2])
    # Two microbatch steps are in the sum and lost; the next update has three of its own.
    before = saved(feeds[:PASSES][:-1], path)
    after = saved(feeds[:PASSES], path)
    names = [n for n in after if "accumulator" in n or "mini_step" in n]
    assert not names
    assert before["GradientAccumulationOptimizer/update_step"] == 1
    assert after["GradientAccumulationOptimizer/update_step"] == 2
    # The same as a run that never had those two microbatch steps.
    assert_same_bits(after, saved(feeds[:PASSES] + feeds[:PASSES]))


def test_local_sums_without_checkpoint_have_no_master_on_the_host():
    """Slices are in no collection of TensorFlow's, so what is in one stays on the host."""
    with program("local").graph.as_default():
        hosted = [*tf.global_variables(), *tf.local_variables(), *tf.get_collection(STAND_INS)]
    sizes = [v.shape.num_elements() for v in hosted if "accumulator" in v.op.name]
    # One scalar stands in for each.
    assert sizes == [1] * len(models.mlp_values())
