"""What the command says before it imports TensorFlow, and that it does."""

import io
import json
import os
import subprocess
import sys
import time

import pytest

from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train.cli import loading
from tests.runtimes.cluster.processes import ROOT
from tests.tools.train.conftest import FASTEST, NO_EVAL, QUICK, TINY

# Prints the exit code, whether TensorFlow was imported, and the processor's seconds.
_PROGRAM = """
import json, sys, time
import mtf_gradsync_command
try:
    code = mtf_gradsync_command.main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(json.dumps([code, "tensorflow" in sys.modules, time.process_time()]))
"""
TRAIN = ["train", "--gin_file=lm_cpu_mesh.gin"]


def _shell(log_level: str | None = None) -> dict[str, str]:
    """The environment of a user's shell; the level that tests run with is their own choice."""
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    return environment if log_level is None else environment | {"TF_CPP_MIN_LOG_LEVEL": log_level}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 0, "sample"),
        (["--help"], 0, "sample"),
        (["--version"], 0, "mtf-gradsync "),
        (["init"], 0, "lm_cpu_mesh\n"),
        (["train", "--help"], 0, "--gin_param"),
        (["plan", "--help"], 0, "--topologies"),
        (["init", "--text", "no.txt"], 2, "cannot read 'no.txt'"),
        (["train", "--gin_file=lm_cpu.gin"], 2, "no such file; did you mean lm_cpu_mesh.gin?"),
        ([*TRAIN, "--model_dir=README.md/x"], 2, "README.md is a file"),
        (["train", "--no_such_flag"], 2, "unrecognized arguments: --no_such_flag"),
    ],
)
@pytest.mark.mostly_slow(every=3)
def test_answers_at_once_and_without_tensorflow(arguments, code, message):
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    *_, last = done.stdout.splitlines()
    ended, has_tensorflow, seconds = json.loads(last)
    assert (ended, has_tensorflow) == (code, False)
    assert seconds < 1.0


def test_a_terminal_is_told_what_takes_long(monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    for is_terminal, seconds, line in (
        (False, 0.0, ""),
        (True, 60.0, ""),
        (True, 0.0, "Loading TensorFlow and Mesh-TensorFlow ...\n"),
    ):
        monkeypatch.setattr(said, "isatty", lambda found=is_terminal: found)
        with loading._loading_message(seconds):
            if line:
                while not said.getvalue():
                    time.sleep(0.001)
        assert said.getvalue() == line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.run:\n  trian_steps = 3", "did you mean train_steps"),
        ("train.run.trian_steps = 3", 'In file "bad.gin", line 1'),
        ("train.run.optimizer = @a/CrosShardOptimizer()", "did you mean CrossShardOptimizer"),
        ("CrossShardOptimzer.opt = 1", "did you mean CrossShardOptimizer"),
        ("train.run.train_steps 3", "bad.gin, line 1"),
        ("train.run.mesh_shape = [1, ", "bad.gin: it ends in the middle of a value"),
        (
            "\ntrain.run.mesh_shape = batch:4",
            "'batch' (bad.gin, line 2): it is no value. Text wants",
        ),
        ("include 'no_such.gin'", "There is no gin file 'no_such.gin'"),
    ],
)
def test_misspelt_names_are_told_with_similar_ones(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.gin").write_text(text)
    with pytest.raises(ConfigError) as error:
        gin_files.load(["bad.gin"], [])
    assert "bad.gin" in str(error.value)
    assert message in str(error.value)


@pytest.mark.slow
def test_a_run_prints_its_own_lines_alone(tmp_path):
    bindings = [*QUICK, FASTEST, NO_EVAL, "train.run.train_steps = 1"]
    command = [
        sys.executable, "-m", "mtf_gradsync_command", "train", f"--gin_file={TINY}",
        f"--model_dir={tmp_path}", *(f"--gin_param={binding}" for binding in bindings),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=_shell(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("step 1/1  loss ")
    own = (
        "steps run on", "The text has", "training ", "1 steps in", "loss curve", "report: ",
        "The layout rule heads:model splits no", "nothing of this run reads the bindings of Self",
    )  # fmt: skip
    assert all(line.startswith(own) for line in done.stdout.splitlines()), done.stdout


@pytest.mark.parametrize("fails", [False, True])
def test_lines_of_c_are_dropped_unless_the_import_fails(fails):
    program = (
        "import os, sys\n"
        "from mtf_gradsync.tools.train.cli.loading import _without_cpp_messages as quiet\n"
        "with quiet():\n"
        "    os.write(2, b'of C\\n'); print('of Python', file=sys.stderr)\n"
        f"    assert not {fails}\n"
        "os.write(2, b'after\\n')\n"
    )
    # The package is not imported for it: it stands with its folder alone, as for the command.
    start = (
        "import sys, types\npackage = types.ModuleType('mtf_gradsync')\n"
        "package.__path__ = ['mtf_gradsync']\nsys.modules['mtf_gradsync'] = package\n"
    )
    command = [sys.executable, "-c", start + program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ("of C\n" in done.stderr) is fails
    assert done.stderr.startswith("of Python\n")
    assert ("after\n" in done.stderr) is not fails


@pytest.mark.parametrize(("level", "is_said"), [(None, False), ("3", False), ("0", True)])
def test_lines_before_a_log_level_is_read_are_for_those_who_ask(level, is_said):
    # TensorFlow 2.17 and later print some whatever the level is.
    program = (
        "import importlib, os, sys, types\npackage = types.ModuleType('mtf_gradsync')\n"
        "package.__path__ = ['mtf_gradsync']\nsys.modules['mtf_gradsync'] = package\n"
        "from mtf_gradsync.tools.train.cli.loading import import_package\n"
        "importlib.reload = lambda package: os.write(2, b'of C\\n')\n"
        "import_package(-1)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=_shell(level), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "of C\n" if is_said else "")
