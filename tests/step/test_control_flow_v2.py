"""Programs that leave TensorFlow 2's control flow on, as it is when TensorFlow starts."""

import json

import numpy as np
import pytest

from tests.forked import Forked
from tests.step.control_flow_v2 import RATE, STEPS, WRAPPERS, batch
from tests.wrappers import passes


@pytest.mark.slow
def test_wrappers_with_branches_train_as_by_hand():
    # A process of its own: the tests' own has switched to version 1.
    program = Forked(["-m", "tests.step.control_flow_v2"])
    assert program.wait() == 0, program.errors()[-2000:]
    found = [json.loads(line) for line in program.output().splitlines()]
    assert [wrapper for wrapper, _, _ in found[::2]] == WRAPPERS
    # Small multiples of 1/32: exact in float32 in any order.
    moved = RATE * sum(batch(step).mean(0) for step in range(STEPS))
    for (name, contributions), kind, value in found:
        steps = passes(name) * contributions // 2
        np.testing.assert_array_equal(value, 1 - moved / steps, err_msg=f"{name} {kind}")
