"""Files that a command is to write are checked before it runs."""

import os
import signal
import subprocess
import sys
import types
from unittest.mock import Mock

import gin
import pytest

from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.tools.train.cli import main as cli
from mtf_gradsync.tools.train.cli.flags import (
    add_json_argument,
    output_path,
    output_paths,
    write_output,
)
from tests.tools.train.conftest import TINY


@pytest.fixture(autouse=True)
def own_search_path(monkeypatch):
    """Folders to search for gin files in, which gin keeps for the process, are those of a test."""
    monkeypatch.setattr(gin.config, "_LOCATION_PREFIXES", list(gin.config._LOCATION_PREFIXES))


def test_outputs_are_paths_in_the_order_of_the_flags(tmp_path):
    given = {"--json": str(tmp_path / "a"), "--png": None, "--trace": str(tmp_path / "b")}
    assert output_paths(given) == [tmp_path / "a", None, tmp_path / "b"]


def test_two_outputs_in_one_file_are_an_error_however_it_is_spelled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--json and --png name the same file: .*/x"):
        output_paths({"--json": "x", "--trace": "y", "--png": str(tmp_path / "x")})


def test_an_interrupted_output_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    path.write_text("before")
    monkeypatch.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_output("--json", path, "after")
    assert [(x.name, x.read_text()) for x in tmp_path.iterdir()] == [("x.json", "before")]


def test_a_device_takes_two():
    assert len(output_paths({"--json": os.devnull, "--png": os.devnull})) == 2


@pytest.mark.parametrize(
    ("command", "flags"), [("plan", ("json", "png")), ("timeline", ("trace", "part"))]
)
def test_commands_end_with_it_before_they_read_a_config(tmp_path, capsys, command, flags):
    arguments = [f"--{flag}={tmp_path / 'x'}" for flag in flags]
    assert cli.main([command, "--gin_file=none.gin", *arguments]) == cli.EXIT_BAD_CONFIG
    assert "name the same file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["plan", "verify", "report"])
def test_names_that_cannot_be_are_told(tmp_path, capsys, command):
    for flag, said in (
        (f"--json={tmp_path}", "is a folder; name a file, such as "),
        (f"--png={tmp_path / 'x.txt'}", "writes a PNG picture: its name must end in .png"),
        (f"--json={tmp_path / 'no' / 'x'}", f"{tmp_path / 'no'} must be a directory"),
    ):
        assert cli.main([command, "--gin_file=none.gin", flag]) == cli.EXIT_BAD_CONFIG
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_json_on_standard_output_is_alone_there(capsys, monkeypatch):
    def arguments(parser):
        add_json_argument(parser, "write it")

    def run(args):
        print("a table")
        write_output("--json", output_path("--json", args.json), '{"a": 1}\n')
        return 3

    monkeypatch.setitem(
        cli._COMMANDS,
        "env",
        types.SimpleNamespace(add_arguments=arguments, main=run, __doc__="A command.\n\nIt says."),
    )
    assert cli.main(["env", "--json=-"]) == 3
    said = capsys.readouterr()
    assert (said.out, said.err) == ('{"a": 1}\n', "a table\n")


def test_who_reads_may_have_seen_enough():
    command = [sys.executable, "-m", "mtf_gradsync_command", "init"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 128 + signal.SIGPIPE


def test_what_cannot_be_made_is_told_before_the_work(tmp_path):
    for name in (f"{tmp_path}/{'x' * 300}", "/proc/x.png", f"{tmp_path}/no/x"):
        with pytest.raises(ConfigError, match=r"--png=.* cannot be written: ."):
            output_path("--png", name)
    there = tmp_path / "there"
    there.write_text("kept")
    assert output_path("--png", str(there)) == there
    assert there.read_text() == "kept"
    assert output_path("--png", str(tmp_path / "new")) == tmp_path / "new"
    assert list(tmp_path.iterdir()) == [there]


# Names and texts that the system, TensorFlow or gin does not take.
LONG, NO_TEXT = "a" * 300, "\udc80\ud800"
HOSTILE = [
    LONG,
    "x/" * 3000,
    NO_TEXT,
    "/proc/self/mem",
    "/dev/null/x",
    "loop",
    "gs://",
    "memory://",
]
FLAGS = {
    "train": ["gin_file", "gin_param", "gin_location_prefix", "model_dir", "cluster_spec"],
    "sample": ["model_dir", "prompt", "seed"],
    "report": ["gin_file", "json", "png"],
    "compile": ["topology", "json", "save_hlo", "gin_param"],
    "plan": ["topologies", "mesh_shape", "layout", "jobs", "png"],
    "verify": ["mesh_shape", "divisions", "without", "steps", "runtime", "json"],
    "timeline": ["model_dir", "trace", "part", "merge", "warm_up"],
}
CASES = [(command, flag) for command, flags in FLAGS.items() for flag in flags]


@pytest.mark.parametrize(("command", "flag"), CASES)
def test_hostile_names_and_texts_end_in_a_line(tmp_path, monkeypatch, capsys, command, flag):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    needed = {
        "gin_file": TINY, "gin_param": "train.run.batch_size = -1", "model_dir": "run",
        **({"prompt": "a"} if command == "sample" else {}),
    }  # fmt: skip
    if command not in ("train", "sample"):
        del needed["model_dir"]
    for value in HOSTILE:
        arguments = [f"--{name}={x}" for name, x in {**needed, flag: value}.items()]
        if flag == "gin_param":
            arguments.append(f"--gin_param={needed[flag]}")
        try:
            code = cli.main([command, *arguments])
        except SystemExit as error:  # of argparse
            code = error.code
        printed = capsys.readouterr().err
        assert code == cli.EXIT_BAD_CONFIG, (value, printed)
        assert "error: " in printed
        assert "Traceback" not in printed


def test_the_rest_of_the_commands_end_in_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["init", "lm_cpu_mesh", LONG],
        ["init", "lm_cpu_mesh", "--text", LONG],
        ["init", "lm_cpu_mesh", "x.gin", "--text", NO_TEXT],
        ["islands", LONG, "--status"],
        ["islands", NO_TEXT],
    ):
        assert cli.main(arguments) == cli.EXIT_BAD_CONFIG, arguments
        printed = capsys.readouterr().err
        assert printed.startswith("mtf-gradsync: error: ")
        assert printed.count("\n") == 1
