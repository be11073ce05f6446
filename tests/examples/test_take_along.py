"""examples/take_along.py."""

import re

import pytest

from tests.examples.commands import run
from tests.runtimes.cluster.processes import ROOT


@pytest.mark.slow
@pytest.mark.xla
def test_what_was_trained_elsewhere_comes_back(tmp_path):
    output = run("take_along.py", "--steps=100", f"--folder={tmp_path}")
    accuracy = re.search(r"held-out accuracy: ([0-9.]+)%", output)
    assert accuracy, output
    assert float(accuracy.group(1)) > 90
    assert "8 cpu devices" in output
    assert len(re.findall(r"^step \d+ loss ", output, re.M)) == 100
    assert (tmp_path / "trained" / "run.py").exists()


def test_it_is_short():
    assert len((ROOT / "examples" / "take_along.py").read_text().splitlines()) < 110
