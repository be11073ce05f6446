"""Runs whose files cannot be written: an error in one line, and the checkpoints as they were."""

import errno
import json
import math
import re

import pytest

from mtf_gradsync.runtimes._common import TrainingError
from mtf_gradsync.runtimes.starting import choose_checkpoint
from mtf_gradsync.tools.train import metrics as metrics_file
from mtf_gradsync.tools.train import train_graph
from mtf_gradsync.tools.train.cli import main as cli
from mtf_gradsync.tools.train.metrics import EventFile
from tests.soak.injected import install
from tests.tools.train.conftest import NO_EVAL, QUICK, TINY, accumulates


def no_space(*unused_args, **unused_kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_full_disk_under_the_metrics_file(train, after_step, tmp_path, monkeypatch):
    directory = tmp_path / "run"
    fill = lambda: monkeypatch.setattr(metrics_file.MetricsFile, "write", no_space)  # noqa: E731
    after_step(8, fill)
    with pytest.raises(TrainingError, match=r"run cannot be written: No space left on device\. "):
        train(NO_EVAL)
    monkeypatch.undo()
    # As it was: the same command goes on from there.
    assert choose_checkpoint(str(directory), False, pytest.fail).step == 6
    result, _, said = train(NO_EVAL)
    assert result.step == 12
    assert any("from step 6 to 12" in line for line in said)


@pytest.mark.slow
def test_checkpoint_that_cannot_be_written(train, after_step, tmp_path, capsys):
    directory = tmp_path / "run"
    # TensorFlow cannot give its file this name.
    in_the_way = directory / "model.ckpt-12.data-00000-of-00001"
    after_step(8, in_the_way.mkdir)
    bindings = [f"--gin_param={one}" for one in (*QUICK, NO_EVAL)]
    code = cli.main(["train", f"--gin_file={TINY}", f"--model_dir={directory}", *bindings])
    assert code == cli.EXIT_FAILED
    error = capsys.readouterr().err
    assert re.search(r"error: The checkpoint of step 12 cannot be written to .*/run: .", error)
    assert "Traceback" not in error
    assert choose_checkpoint(str(directory), False, pytest.fail).step == 6
    assert not list(directory.glob("*tempstate*"))
    in_the_way.rmdir()
    after_step(None)
    assert train(NO_EVAL)[0].step == 12


@pytest.mark.parametrize("runtime", ["cpu_replicas", "placement_mesh"])
@pytest.mark.mostly_slow
def test_no_checkpoint_is_written_of_what_is_not_finite(train, tmp_path, monkeypatch, runtime):
    """The loss of a step is that before its update: it does not show what the update has done."""
    original = train_graph._make_optimizer

    def last_rate_is_nan(optimizer, rate):
        step = train_graph.tf.train.get_global_step().read_value()
        at_last = train_graph.tf.where(train_graph.tf.equal(step, 11), math.nan, 0.01)
        return original(optimizer, at_last)

    monkeypatch.setattr(train_graph, "_make_optimizer", last_rate_is_nan)
    message = r"embedding.* and \d+ more hold numbers that are not finite, after step 12"
    with pytest.raises(TrainingError, match=message):
        train(NO_EVAL, f"train.run.runtime = '{runtime}'")
    assert choose_checkpoint(str(tmp_path / "run"), False, pytest.fail).step == 6


@pytest.mark.slow
def test_no_checkpoint_is_written_of_sums_that_are_not_finite(train, tmp_path, monkeypatch):
    """They would be in the next update, and in that of each run that goes on from there."""
    install(json.dumps(["nan_in_shard", {"step": 5, "shard": 1}]), monkeypatch.setattr)
    accumulation = accumulates(
        accumulate="'local'", mesh_shape="'batch:2;model:1'", layout="'batch:batch'"
    )
    with pytest.raises(TrainingError, match=r"hold numbers that are not finite, after step 6; no"):
        train(NO_EVAL, *accumulation)
    assert choose_checkpoint(str(tmp_path / "run"), False, pytest.fail).path is None


def test_event_file_says_what_it_cannot_write(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        EventFile(tmp_path / "gone", 0)
    file = EventFile(tmp_path, 0)
    file.write(1, {"loss": 1.0})
    file.close()
    file.close()
    with pytest.raises(OSError, match="events"):
        file.write(2, {"loss": 1.0})
