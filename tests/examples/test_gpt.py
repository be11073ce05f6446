"""examples/gpt.py."""

import re
import sys

import numpy as np
import pytest

from tests.examples.commands import run
from tests.runtimes.cluster.processes import ROOT

STEPS = 10


@pytest.mark.slow
def test_it_is_a_program():
    assert "--steps" in run("gpt.py", "--help")


@pytest.mark.slow
def test_it_learns_and_the_line_to_add_changes_no_loss(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    import gpt

    # A smaller one is built sooner; the layout is the same.
    monkeypatch.setattr(gpt, "PARAMS", {**gpt.PARAMS, "n_layer": 1, "mesh_shape": "x:2,y:2"})
    wrapped = gpt.main(STEPS)
    printed = capsys.readouterr().out
    first, last = (float(x) for x in re.findall(r"(?:step|tenth): ([0-9.]+)", printed))
    # 256 bytes: a uniform guess has 5.55.
    assert first > 5 > last

    monkeypatch.setattr(gpt.gs, "CrossShardOptimizer", lambda optimizer: optimizer)
    # Sums in float32 of what is bfloat16, in another order.
    np.testing.assert_allclose(wrapped, gpt.train(gpt.PARAMS, STEPS), rtol=2.0**-8)
