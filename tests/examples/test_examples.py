"""Every example runs as a program of its own, and does what it says."""

from __future__ import annotations

import re

import pytest

from tests.cluster.processes import ROOT, Processes

pytest.importorskip("sklearn", reason="the examples need the extra 'examples'")

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def run(name, *args):
    """Runs an example and returns what it printed."""
    with Processes(time_limit=300) as processes:
        process = processes.fork(ROOT / "examples" / name, *args)
        return processes.wait(process)


def test_every_example_has_a_test():
    assert EXAMPLES == [
        "accumulate.py",
        "digits.py",
        "from_v1.py",
        "gpt.py",
        "handwriting.py",
        "model_fn.py",
        "run_t5.py",  # tests/pipelines/test_t5.py
        "sync_replicas.py",
        "take_along.py",
    ]


def test_digits_learns_to_read_them():
    output = run("digits.py", "--steps=100")
    accuracy = re.search(r"held-out accuracy: ([0-9.]+)%", output)
    assert accuracy, output
    assert float(accuracy.group(1)) > 90


def test_digits_fits_on_one_screen():
    assert len((ROOT / "examples" / "digits.py").read_text().splitlines()) < 100
