"""Which Python make takes, and when it makes its environment anew."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / ".ci"

pytestmark = pytest.mark.skipif(not SCRIPTS.exists(), reason="not a checkout")

FITS = f'exec "{sys.executable}" "$@"'
SHIM_OF_NOTHING = "exit 127"
TOO_OLD = 'case "$2" in *print*) echo 3.9.18;; *) exit 1;; esac'


@pytest.fixture
def find_python(tmp_path):
    """Runs the script where only some commands are to be found."""

    def run(commands, *arguments):
        for name, script in commands.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
        return subprocess.run(
            [SCRIPTS / "find_python", *arguments],
            env={**os.environ, "PATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.parametrize(
    ("commands", "found"),
    [
        ({"python3": FITS, "python3.12": FITS, "python3.11": FITS}, "python3.11"),
        ({"python3.11": SHIM_OF_NOTHING, "python3.10": FITS, "python3": FITS}, "python3.10"),
        ({"python3.11": SHIM_OF_NOTHING, "python3": TOO_OLD, "python": FITS}, "python"),
    ],
)
def test_the_machine_s_own_python(find_python, commands, found):
    assert find_python(commands).stdout == f"{found}\n"


def test_a_python_that_is_asked_for(find_python):
    commands = {"python3.11": FITS, "mine": FITS, "old": TOO_OLD}
    assert find_python(commands, "mine").stdout == "mine\n"
    assert find_python(commands, "old", "mine").stdout == "mine\n"
    refused = find_python(commands, "old")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "among old there is none (old is 3.9.18)" in refused.stderr


def test_no_python_that_fits_is_one_line(find_python):
    refused = find_python({"python3.11": SHIM_OF_NOTHING, "python3": TOO_OLD})
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith("This needs Python 3.10, 3.11, 3.12 or 3.13 with its modules venv and")
    assert "(python3 is 3.9.18)" in line
    assert line.endswith("make PYTHON=/path/to/python3.11")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder like a checkout, with what commands were run; `fail` makes pip fail."""
    spec = importlib.util.spec_from_file_location("make_venv", SCRIPTS / "make_venv.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set.txt").write_text("numpy==1.26.4\n")
    (tmp_path / "pyproject.toml").write_text("")

    class Checkout:
        fail = False

        def __init__(self):
            self.ran = []
            self.module = module
            self.venv = tmp_path / "venv"
            self.mark = self.venv / "lib" / "mark"

        def make(self, python=None, extras="train"):
            """Makes the environment; returns whether anew, whether pip ran."""
            self.ran.clear()
            if python:
                monkeypatch.setattr(module.sys, "_base_executable", python)
            arguments = ["make_venv.py", "venv", "--constraints=set.txt", f"--extras={extras}"]
            monkeypatch.setattr(module.sys, "argv", arguments)
            module.main()
            return "venv" in self.ran, "pip" in self.ran

        def run(self, command, check):
            assert check
            self.ran.append(command[2])
            if command[2] == "venv":
                self.mark.parent.mkdir()
                self.mark.touch()
            elif self.fail:
                raise subprocess.CalledProcessError(1, command)

    made = Checkout()
    monkeypatch.setattr(module.subprocess, "run", made.run)
    return made


def test_an_environment_is_made_once(checkout):
    assert checkout.make() == (True, True)
    assert checkout.make() == (False, False)
    Path("pyproject.toml").write_text("# changed\n")
    assert checkout.make() == (False, True)
    assert checkout.make() == (False, False)


def test_another_python_or_set_makes_it_anew(checkout):
    checkout.make()
    (checkout.venv / "old").touch()
    assert checkout.make(python="/usr/bin/another") == (True, True)
    assert not (checkout.venv / "old").exists()
    Path("set.txt").write_text("numpy==2.4.6\n")
    assert checkout.make() == (True, True)
    assert checkout.make(extras="train,xla") == (True, True)
    assert checkout.make(extras="train,xla") == (False, False)


def test_after_a_failure_it_is_made_anew(checkout):
    checkout.fail = True
    with pytest.raises(SystemExit, match=r"venv could not be made: .*The next make begins it anew"):
        checkout.make()
    checkout.fail = False
    assert checkout.make() == (True, True)
    # One that was being updated when it failed, too.
    Path("pyproject.toml").write_text("# changed\n")
    checkout.fail = True
    with pytest.raises(SystemExit):
        checkout.make()
    checkout.fail = False
    assert checkout.make() == (True, True)


def test_an_environment_of_an_older_makefile_is_made_anew(checkout):
    checkout.venv.mkdir()
    for name in ("pyvenv.cfg", ".installed"):
        (checkout.venv / name).touch()
    assert checkout.make() == (True, True)


def test_a_folder_that_is_no_environment_stays_as_it_is(checkout):
    checkout.venv.mkdir()
    (checkout.venv / "thesis.tex").touch()
    with pytest.raises(SystemExit, match="venv is not a virtual environment"):
        checkout.make()
    assert [p.name for p in checkout.venv.iterdir()] == ["thesis.tex"]


def test_the_set_fits_the_python(checkout, monkeypatch):
    for minor, tensorflow in ((10, "2.15"), (11, "2.15"), (12, "2.21"), (13, "2.21")):
        monkeypatch.setattr(checkout.module.sys, "version_info", (3, minor, 0))
        assert checkout.module.fitting_set() == f"constraints/tf-{tensorflow}.txt"
        assert (SCRIPTS.parent / checkout.module.fitting_set()).exists()
