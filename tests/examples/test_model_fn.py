"""examples/model_fn.py."""

import re

import pytest

from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE
from tests.examples.commands import run


@pytest.mark.slow
def test_it_learns_and_predicts_as_it_evaluates():
    runtime = "estimator" if ESTIMATOR_AVAILABLE else "placement_mesh"
    output = run("model_fn.py", "--steps=60", f"--runtime={runtime}")
    assert "exported:" in output
    evaluated, predicted = re.findall(r"([0-9.]+)%", output)
    assert evaluated == predicted, output
    # A guess finds 10%.
    assert float(evaluated) > 60, output
