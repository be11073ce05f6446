"""examples/accumulate.py."""

import re

import pytest

from tests.examples.commands import run
from tests.runtimes.cluster.processes import ROOT


@pytest.mark.slow
def test_micro_steps_train_as_big_batches_do():
    output = run("accumulate.py", "--updates=40")
    accuracy = re.search(r"held-out accuracy: ([0-9.]+)%", output)
    difference = re.search(r"difference from training on the big batches: (\S+)", output)
    assert accuracy, output
    assert difference, output
    assert float(accuracy.group(1)) > 90
    # 40 steps of Adam, which make differences of an eps or so in the gradients grow: a wrong
    # gradient moves weights by the learning rate, 0.02, on the first of them.
    assert float(difference.group(1)) < 1e-3


def test_it_is_short():
    assert len((ROOT / "examples" / "accumulate.py").read_text().splitlines()) < 120
