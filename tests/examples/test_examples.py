"""Every example runs as a program of its own, and does what it says."""

from __future__ import annotations

import re

import pytest

from tests.runtimes.cluster.processes import ROOT, Processes

pytest.importorskip("sklearn", reason="the examples need the extra 'examples'")

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


# Grappler takes longer than the steps of an example; see tests/grappler.py.
_WITHOUT_GRAPPLER = """
import os, runpy, sys
from tests import grappler
grappler.turn_off()
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(name, *args, with_grappler=False):
    """Runs an example and returns what it printed."""
    command = [ROOT / "examples" / name, *args]
    if not with_grappler:
        command = ["-c", _WITHOUT_GRAPPLER, *command]
    with Processes() as processes:
        process = processes.fork(*command)
        return processes.wait(process)


def test_every_example_has_a_test():
    assert EXAMPLES == [
        "accumulate.py",
        "digits.py",
        "from_v1.py",
        "gpt.py",
        "handwriting.py",
        "model_fn.py",
        "run_mtf.py",  # tests/pipelines/test_utils_run.py
        "run_t5.py",  # tests/pipelines/test_t5.py
        "sync_replicas.py",
        "take_along.py",
    ]


@pytest.mark.slow
def test_digits_learns_to_read_them():
    output = run("digits.py", "--steps=100", with_grappler=True)
    accuracy = re.search(r"held-out accuracy: ([0-9.]+)%", output)
    assert accuracy, output
    assert float(accuracy.group(1)) > 90


def test_digits_fits_on_one_screen():
    assert len((ROOT / "examples" / "digits.py").read_text().splitlines()) < 100
