"""The command ``mtf-gradsync compile``."""

import json

import pytest

from mtf_gradsync import xla
from mtf_gradsync.runtimes._common import install_extra
from mtf_gradsync.tools.train.cli import compile as command
from mtf_gradsync.tools.train.cli import main as cli
from tests.tools.train.conftest import NO_ATTENTION, TINY

missing = xla.why_no_tpu_compiler()


@pytest.mark.skipif(not missing, reason="the TPU compiler is installed")
@pytest.mark.parametrize("command", ["compile", "plan"])
def test_without_the_compiler_the_error_says_what_to_install(capsys, command):
    assert cli.main([command, f"--gin_file={TINY}"]) == cli.EXIT_FAILED
    assert install_extra("tpu") in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_reported_first(capsys):
    name = "/no/such/directory/compiled.json"
    assert cli.main(["compile", f"--gin_file={TINY}", f"--json={name}"]) == cli.EXIT_BAD_CONFIG
    assert f"--json={name} cannot be written" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_reported_first(capsys, tmp_path):
    name = tmp_path / "file" / "folder"
    name.parent.write_text("")
    assert cli.main(["compile", f"--gin_file={TINY}", f"--save_hlo={name}"]) == cli.EXIT_BAD_CONFIG
    assert f"--save_hlo={name} cannot be made: Not a directory" in capsys.readouterr().err


def test_a_full_disk_is_an_error_of_one_line_below_the_result(capsys, monkeypatch):
    answer = xla.CompiledProgram("v3:2x2", "TPU v3", 8, "no", (), (), (), None, 0.0)
    monkeypatch.setattr(command, "compile_config", lambda *unused: answer)
    status = cli.main(["compile", f"--gin_file={TINY}", "--json=/dev/full"])
    printed = capsys.readouterr()
    assert status == cli.EXIT_FAILED
    assert "refused: no" in printed.out
    assert "--json=/dev/full cannot be written: No space left on device" in printed.err


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.skipif(bool(missing), reason=missing)
def test_compiles_the_transformer_of_a_config(capsys, tmp_path):
    path = tmp_path / "compiled.json"
    tokens = 4 * 16 // 2  # two microbatches
    status = cli.main(
        [
            "compile",
            f"--gin_file={TINY}",
            f"--gin_param=serialize_num_microbatches.tokens_per_microbatch_per_replica = {tokens}",
            "--topology=v5e:2x2",
            f"--json={path}",
            f"--save_hlo={tmp_path}",
        ]
    )
    assert status == 0
    assert "accepted" in capsys.readouterr().out
    compiled = json.loads(path.read_text())
    assert compiled["num_replicas"] == 4
    assert compiled["memory"]["aliased"] > 0
    assert len(compiled["after"]) <= len(compiled["before"])
    assert {bool(c["inside"]) for c in compiled["before"]} == {False, True}
    assert "ENTRY" in (tmp_path / "after.hlo.txt").read_text()


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.skipif(bool(missing), reason=missing)
def test_a_topology_of_another_size_is_a_bad_config(capsys):
    arguments = ["compile", f"--gin_file={TINY}", "--topology=v3:2x2"]
    arguments.append(f"--gin_param={NO_ATTENTION}")
    assert cli.main(arguments) == cli.EXIT_BAD_CONFIG
    assert "has 8 cores and the program's mesh 4" in capsys.readouterr().err
