"""``mtf-gradsync timeline``, and ``train.run.timeline_steps``."""

import functools
import gzip
import json
import signal
from unittest import mock

import pytest

from mtf_gradsync.runtimes._signals import Interruption
from mtf_gradsync.tools.timelines import Table, Timeline
from mtf_gradsync.tools.train import timed_run
from mtf_gradsync.tools.train.cli.main import main
from tests.tools.planning.machines import interrupted_and_dropped
from tests.tools.timelines.recordings import two_cores
from tests.tools.train.conftest import NO_EVAL, QUICK, TINY

ARGUMENTS = ["--steps=2", "--warm_up=1"]
PARAMS = [f"--gin_param={binding}" for binding in (*QUICK, NO_EVAL)]


def read(path):
    return json.loads(gzip.decompress(path.read_bytes()))


@pytest.mark.slow
def test_of_gin_files(tmp_path, capsys):
    trace, table, part = (tmp_path / name for name in ("a.json.gz", "table.json", "a.part"))
    files = [f"--trace={trace}", f"--json={table}", f"--part={part}"]
    assert main(["timeline", f"--gin_file={TINY}", *PARAMS, *ARGUMENTS, *files]) == 0
    said = capsys.readouterr().out
    assert "2 steps" in said
    assert "longest operations" in said
    assert str(trace) in said
    found = Table.from_json(table.read_text())
    assert found.steps == 2
    assert found.runtime == "cpu_replicas"
    assert len(found.cores) == 2
    names = {row["name"] for row in read(trace)["traceEvents"]}
    # As the model's graph has them.
    assert any(name.startswith("transformer/block_000/layer_000/") for name in names)
    assert any("CrossReplicaSum" in one.name for one in found.collectives)
    merged = tmp_path / "merged.json.gz"
    assert main(["timeline", f"--merge={part}", f"--trace={merged}"]) == 0
    assert len(read(merged)["traceEvents"]) == len(read(trace)["traceEvents"])


@pytest.mark.slow
def test_of_a_run_that_recorded_its_own(train, tmp_path, capsys):
    _, directory, _said = train(
        NO_EVAL, "train.run.timeline_steps = 3", "train.run.train_steps = 9"
    )
    found = Table.from_json((directory / "timeline.json").read_text())
    assert found.steps == 3
    page = (directory / "report.html").read_text()
    assert "Where a step's time goes" in page
    assert "Steps 6 to 8 were recorded" in page
    assert "on the mesh <code>batch:2;model:1</code>." in page
    assert found.operations[0].name in page
    assert read(directory / "timeline.trace.json.gz")["traceEvents"]
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    trace = tmp_path / "b.json.gz"
    assert main(["timeline", f"--model_dir={directory}", *ARGUMENTS, f"--trace={trace}"]) == 0
    out = capsys.readouterr().out
    assert "model.ckpt-9" in out
    assert "2 steps" in out
    assert trace.exists()
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before
    (directory / "model.ckpt-9.data-00000-of-00001").write_bytes(b"")
    assert main(["timeline", f"--model_dir={directory}"]) == 2
    # The command itself has no such flag, and moves nothing.
    assert "With `mtf-gradsync train --skip_damaged_checkpoint`" in capsys.readouterr().err


@pytest.fixture
def timed(monkeypatch):
    """What steps were asked for; none are made."""
    made = mock.create_autospec(timed_run.record_steps, return_value=Timeline.of([two_cores()]))
    monkeypatch.setattr(timed_run, "record_steps", made)
    return made


def test_a_checkpoint_of_another_configuration(timed, tmp_path):
    (tmp_path / "operative_config.gin").write_text(f"include '{TINY}'")
    for flags, accepted in (([], False), (["--accept_checkpoint_differences"], True)):
        assert main(["timeline", f"--model_dir={tmp_path}", "--trace=", *flags]) == 0
        assert timed.call_args.kwargs["accepts_differences"] is accepted


def test_a_run_that_has_no_config(timed, tmp_path, capsys):
    (tmp_path / "model.ckpt-7.index").touch()
    flags = ["timeline", f"--model_dir={tmp_path}", "--trace="]
    assert main(flags) == 2
    assert "no operative_config.gin" in (said := capsys.readouterr().err)
    assert "give its config by --gin_file" in said
    assert main([*flags, f"--gin_file={TINY}"]) == 0
    assert str(tmp_path) in timed.call_args.args
    (tmp_path / "model.ckpt-7.index").unlink()
    assert main([*flags, f"--gin_file={TINY}"]) == 2
    assert "and no checkpoint" in capsys.readouterr().err


def test_merging_processes(tmp_path, capsys):
    parts = []
    for process in (0, 1):
        parts.append(tmp_path / f"{process}.part")
        parts[-1].write_text(two_cores(process).to_json())
    trace = tmp_path / "both.json.gz"
    merges = [f"--merge={part}" for part in parts]
    assert main(["timeline", *merges, f"--trace={trace}"]) == 0
    assert "core 3" in capsys.readouterr().out
    parts[1].write_text("{}")
    assert main(["timeline", *merges, f"--trace={trace}"]) == 2
    assert "no part of a timeline" in capsys.readouterr().err


def test_what_a_small_trace_drops_is_said(tmp_path, capsys, monkeypatch):
    part = tmp_path / "0.part"
    part.write_text(two_cores().to_json())
    trace = tmp_path / "trace.json"
    monkeypatch.setattr(Timeline, "save", functools.partialmethod(Timeline.save, most_bytes=2200))
    assert main(["timeline", f"--merge={part}", f"--trace={trace}"]) == 0
    said = capsys.readouterr().out
    assert trace.stat().st_size <= 2200
    shown = sum(row.get("cat") is not None for row in json.loads(trace.read_text())["traceEvents"])
    assert 0 < shown < 8
    assert (
        f"trace of {shown} operations, without the {8 - shown} shortest operations: {trace}" in said
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model_dir=nowhere"], "is no run"),
        (["--trace=nowhere/a.json", "--merge=x"], "--trace=nowhere/a.json cannot be written"),
        (["--merge=missing"], "--merge: "),
    ],
)
def test_bad_arguments(arguments, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["timeline", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["trace", "json", "part"])
def test_a_file_that_cannot_be_written(flag, capsys, monkeypatch, tmp_path):
    part = tmp_path / "0.part"
    part.write_text(two_cores().to_json())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    file = tmp_path / "file"
    assert main(["timeline", f"--merge={part}", "--trace=", f"--{flag}={file}"]) == 1
    assert f"--{flag}={file} cannot be written: No space left on device" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_too_short_for_its_timeline(train, capsys):
    _, directory, _said = train(
        NO_EVAL, "train.run.timeline_steps = 3", "train.run.train_steps = 7"
    )
    assert "no timeline: it would be of steps 6 to 8" in capsys.readouterr().err
    assert not (directory / "timeline.json").exists()


def test_a_bad_number_of_steps(train):
    with pytest.raises(ValueError, match="timeline_steps must be a whole number from 0"):
        train("train.run.timeline_steps = -1")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_ctrl_c_that_the_garbage_collector_drops_ends_the_steps():
    runner = mock.Mock(steps_ahead=0)
    runner.dispatch.side_effect = [dict, lambda: interrupted_and_dropped(signal.SIGINT) or {}, dict]
    with pytest.raises(KeyboardInterrupt), Interruption() as stop:
        timed_run._make_steps(runner, 3, stop)
    assert runner.dispatch.call_count == 2
