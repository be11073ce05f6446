"""examples/from_v1.py."""

import re

import pytest

from tests.examples.commands import run


@pytest.mark.slow
def test_a_model_that_moves_to_a_mesh_and_back_ends_as_one_that_stays():
    output = run("from_v1.py", "--steps=90")
    losses = [float(x) for x in re.findall(r"mesh[a-z ]*: ([0-9.]+)", output)]
    assert len(losses) == 3, output
    assert losses[2] < losses[0], output
    # 90 steps of Adam, which make differences of an eps or so in the gradients grow; one slot left
    # behind moves weights by the learning rate, 0.01, on the first of them.
    difference = float(re.search(r"never moved: (\S+)", output).group(1))
    assert difference < 1e-3, output
