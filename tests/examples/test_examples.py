"""Every example runs as a program of its own, and does what it says."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.examples.commands import run
from tests.runtimes.cluster.processes import ROOT

# To import it here would take seconds, in processes that have other tests, too.
if importlib.util.find_spec("sklearn") is None:
    pytest.skip("the examples need the extra 'examples'", allow_module_level=True)

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


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
