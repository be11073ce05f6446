"""What several processes on XLA devices are asked for."""

import contextlib
import signal
from unittest import mock

import pytest

from mtf_gradsync import xla
from mtf_gradsync.runtimes._common import ConfigError, TrainingError
from mtf_gradsync.runtimes.starting import Start
from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train.cli.main import main
from mtf_gradsync.tools.train.distributed_run import run_on_processes
from mtf_gradsync.xla import gathering
from tests.tools.train.conftest import TINY

FLAGS = ["--coordinator=localhost:1", "--num_processes=2", "--process_id=1"]


@pytest.fixture
def settings(monkeypatch):
    """The settings by which this process would have met the others."""
    found = {}

    def start(*_, settings, **__):
        found.update(settings)
        raise xla.ProcessesError("nobody there")

    monkeypatch.setattr(xla, "start_processes", start)
    return found


def test_a_timeline_compares_what_its_number_of_steps_depends_on(settings, capsys):
    flags = ["--steps=4", "--warm_up=2", "--trace="]
    assert main(["timeline", f"--gin_file={TINY}", *FLAGS, *flags]) == 1
    assert "nobody there" in capsys.readouterr().err
    assert settings == {
        "train.run.train_steps": 12,
        "train.run.save_checkpoints_steps": 6,
        "train.run.log_steps": 1,
        "train.run.timeline_steps": 0,
        "--steps": 4,
        "--warm_up": 2,
    }


def test_training_compares_its_schedule(settings, tmp_path):
    binding = "--gin_param=train.run.timeline_steps = 3"
    assert main(["train", f"--gin_file={TINY}", binding, *FLAGS, f"--model_dir={tmp_path}"]) == 1
    assert settings["train.run.timeline_steps"] == 3
    assert "--steps" not in settings


@pytest.mark.parametrize("binding", ["train_steps = 1.5", "timeline_steps = -1"])
def test_a_bad_schedule_is_an_error_before_the_others_are_met(settings, tmp_path, binding):
    gin_files.load([TINY], [f"train.run.{binding}"])
    with pytest.raises(ConfigError, match=binding.partition(" ")[0]):
        run_on_processes(gin_files.bound_run_config(), str(tmp_path), "localhost:1", 2, 1)
    assert not settings


@pytest.fixture
def joined(monkeypatch):
    """The others are there; process 0 has found the checkpoint of step 12."""
    texts = mock.Mock(side_effect=lambda text: ["12", text])
    monkeypatch.setattr(gathering, "_texts_of_all", texts)
    # Not `xla.Processes`, which would leave the others when the tests end.
    processes = mock.Mock(in_turn=lambda work: work(), check_equal=gathering.check_equal)
    monkeypatch.setattr(xla, "start_processes", lambda *_, **__: contextlib.nullcontext(processes))


@pytest.mark.parametrize(
    ("more", "said"),
    [({}, "evaluates, and writes to here"), ({"first_does": "writes a trace"}, "writes a trace")],
)
def test_what_the_others_say_of_process_0(joined, more, said):
    gin_files.load([TINY], [])
    lines, work = [], mock.Mock()
    where = "here", "localhost:1", 2, 1
    run_on_processes(gin_files.bound_run_config(), *where, say=lines.append, work=work, **more)
    assert lines == [f"process 0 {said}"]
    work.assert_called_once()


def test_all_go_on_from_the_same_step(joined):
    def run_from(step):
        def work(config, model_dir, say, role):
            return role.choose_start(lambda: Start(step=step))

        run_on_processes(gin_files.bound_run_config(), "here", "localhost:1", 2, 1, work=work)

    gin_files.load([TINY], [])
    run_from(12)
    with pytest.raises(TrainingError, match="model_dir is 12 on process 0 and 6 on process 1"):
        run_from(6)


def test_what_a_signal_does_is_left_to_the_caller(joined):
    gin_files.load([TINY], [])

    def handlers(*_, **__):
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    where = "here", "localhost:1", 2, 0
    found = run_on_processes(gin_files.bound_run_config(), *where, work=handlers)
    assert found == handlers()
