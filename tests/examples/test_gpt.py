"""examples/gpt.py."""

import re
import sys

import numpy as np

from tests.examples.test_examples import ROOT, run


def test_it_learns():
    output = run("gpt.py", "--steps=10")
    first, last = (float(x) for x in re.findall(r"(?:step|tenth): ([0-9.]+)", output))
    # 256 bytes: a uniform guess has 5.55.
    assert first > 5 > last


def test_the_line_to_add_changes_no_loss(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    import gpt

    params = {**gpt.PARAMS, "n_embd": 16, "n_ctx": 16, "n_layer": 1, "warmup_steps": 1}
    wrapped = gpt.train(params, 5)
    monkeypatch.setattr(gpt.gs, "CrossShardOptimizer", lambda optimizer: optimizer)
    # Sums in float32 of what is bfloat16, in another order.
    np.testing.assert_allclose(wrapped, gpt.train(params, 5), rtol=2.0**-8)
    assert wrapped[-1] < wrapped[0]
