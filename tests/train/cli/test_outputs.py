"""Files that a command is to write are checked before it runs."""

import os

import pytest

from mtf_gradsync._common import ConfigError
from mtf_gradsync.train.cli import main as cli
from mtf_gradsync.train.cli.arguments import output_paths


def test_outputs_are_paths_in_the_order_of_the_flags(tmp_path):
    given = {"--json": str(tmp_path / "a"), "--png": None, "--trace": str(tmp_path / "b")}
    assert output_paths(given) == [tmp_path / "a", None, tmp_path / "b"]


def test_two_outputs_in_one_file_are_an_error_however_it_is_spelled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--json and --png name the same file: .*/x"):
        output_paths({"--json": "x", "--trace": "y", "--png": str(tmp_path / "x")})


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
