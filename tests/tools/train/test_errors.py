"""Errors that come out of steps, hooks and data: named as what they are."""

import shutil

import gin
import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes._common import TrainingError
from mtf_gradsync.runtimes.simd.replica_session import VariableAccess
from mtf_gradsync.runtimes.starting import choose_checkpoint, latest_checkpoint
from mtf_gradsync.tools.train.cli import main as cli
from mtf_gradsync.tools.train.data.batches import DataError, TrainingBatches
from mtf_gradsync.tools.train.runner import Runner, SimdProgramRunner
from tests.tools.train.conftest import NO_EVAL, QUICK, TINY


class Fails(tf.train.SessionRunHook):
    """A hook of somebody else."""

    def __init__(self):
        self._runs = 0

    def before_run(self, unused_context):
        self._runs += 1
        # The first run reads the step.
        if self._runs == 9:
            raise ValueError("no answer from the tracker")


@pytest.mark.slow
def test_an_error_of_a_hook_is_one_of_the_step(tmp_path, capsys):
    gin.external_configurable(Fails, "Fails")
    hook = ["train.run.hooks = [@Fails]", "train.run.runtime = 'placement_mesh'"]
    bindings = [f"--gin_param={one}" for one in (*QUICK, NO_EVAL, *hook)]
    code = cli.main(["train", f"--gin_file={TINY}", f"--model_dir={tmp_path}", *bindings])
    error = capsys.readouterr().err
    # Not the code that says that nothing was begun.
    assert code == cli.EXIT_FAILED
    assert "A step after step 7 failed: ValueError: no answer from the tracker." in error
    assert "The newest checkpoint is of step 6." in error
    assert "Traceback" not in error


def test_a_file_that_the_data_lack_is_not_one_that_cannot_be_written(train):
    def data(**unused):
        open("/no/such/corpus.txt")  # noqa: SIM115

    gin.external_configurable(data, "data")
    with pytest.raises(TrainingError) as raised:
        train(NO_EVAL, "train.run.train_dataset_fn = @data")
    assert "/no/such/corpus.txt" in str(raised.value)
    assert "cannot be written" not in str(raised.value)


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.mostly_slow
def test_one_of_several_processes_saves_nothing_while_the_others_are_in_a_step(
    train, tmp_path, monkeypatch, is_alone
):
    original = TrainingBatches.next

    def next_batch(self):
        if self._step == 8:
            raise DataError("no more.")
        return original(self)

    monkeypatch.setattr(TrainingBatches, "next", next_batch)
    # What the runner finds out itself is not kept: it is in one process.
    stays = property(lambda self: is_alone, lambda self, found: None)
    monkeypatch.setattr(Runner, "is_alone", stays)
    monkeypatch.setattr(SimdProgramRunner, "agreed_stop", lambda self, received: received)
    kept = 8 if is_alone else 6
    with pytest.raises(DataError, match=rf"no more\. The newest checkpoint is of step {kept}\."):
        train(NO_EVAL)
    assert choose_checkpoint(str(tmp_path / "run"), False, pytest.fail).step == kept


@pytest.mark.slow
def test_a_finished_run_that_was_moved_is_evaluated_where_it_is(train, tmp_path):
    _, directory, _ = train(NO_EVAL, "train.run.train_steps = 2")
    newest = directory / "model.ckpt-2"
    (directory / "checkpoint").write_text(f'model_checkpoint_path: "{newest}"\n')
    moved = shutil.move(directory, tmp_path / "moved")
    assert latest_checkpoint(str(moved)) == str(moved / "model.ckpt-2")
    again, _, said = train("train.run.train_steps = 2", model_dir="moved")
    assert any("has all 2 steps already" in line for line in said)
    assert again.held_out is not None


@pytest.mark.parametrize(
    ("every", "said"),
    [
        # Step 6 has a checkpoint, before which they are compared, too.
        (100, "have become different by global step 6"),
        (5, "have become different by global step 5"),
    ],
)
@pytest.mark.mostly_slow
def test_copies_that_part_end_the_run_before_they_are_saved(
    train, tmp_path, monkeypatch, every, said
):
    original = SimdProgramRunner.dispatch

    def dispatch(self):
        result = original(self)
        if result()["step"] == 5:
            session = self._session.tf_session
            access = VariableAccess(session.graph)
            name = next(name for name in access.read if name.endswith("_slice_1"))
            value = np.array(session.run(access.read[name]))
            value.reshape(-1)[0] += 1
            access.set(session, [(name, value)])
        return result

    monkeypatch.setattr(SimdProgramRunner, "dispatch", dispatch)
    with pytest.raises(TrainingError) as error:
        train(
            NO_EVAL,
            f"train.run.watch_copies_steps = {every}",
            "train.run.save_checkpoints_steps = 3",
        )
    assert said in str(error.value)
    assert "core 1 has other bits than core 0" in str(error.value)
    assert str(error.value).endswith("The newest checkpoint is of step 3.")
    assert choose_checkpoint(str(tmp_path / "run"), False, pytest.fail).step == 3
