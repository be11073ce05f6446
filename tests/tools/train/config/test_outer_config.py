"""configs/lm_outer.gin, with the model made small."""

import numpy as np
import pytest

from tests.sessions import saved_variables
from tests.tools.train.config import small_lm
from tests.tools.train.conftest import REPORTS

ROUNDS = [
    "OuterOptimizer.inner_steps = 2",
    "train.run.save_checkpoints_steps = 3",
    # The config's schedule depends on how long the run is to be.
    "train.run.learning_rate_schedule = [0.02]",
]


@pytest.mark.slow
def test_goes_on_in_the_middle_of_a_round_and_keeps_outer_values(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    small_lm.train("lm_outer.gin", straight, "batch:2;model:1", 5, REPORTS, *ROUNDS)
    for steps in (3, 5):
        small_lm.train("lm_outer.gin", killed, "batch:2;model:1", steps, REPORTS, *ROUNDS)
    found, expected = (saved_variables(d) for d in (killed, straight))
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert expected["OuterOptimizer/inner_step"] == 5
    held = [name for name in expected if name.endswith("/island")]
    outer = [name for name in held if name.removesuffix("/island") in expected]
    assert 0 < len(outer) < len(held)
    # A step after the last outer step, each island is elsewhere.
    moved = [np.abs(np.diff(expected[name], axis=0)).max() for name in outer]
    assert max(moved) > 0
    assert small_lm.losses(straight)[3:] == small_lm.losses(killed)[-2:]
