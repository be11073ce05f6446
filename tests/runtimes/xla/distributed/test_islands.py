"""Islands that are processes, with compressed sums between them, are as those of one process."""

import numpy as np
import pytest

from tests.runtimes.xla.distributed import job
from tests.runtimes.xla.distributed.jobs import results
from tests.sessions import assert_same_bits

pytestmark = [pytest.mark.slow, pytest.mark.xla]


@pytest.fixture(scope="module")
def of_two(jobs):
    return jobs.run(2, odd="islands")


@pytest.fixture(scope="module")
def of_one(jobs, of_two):
    return jobs.run(1, odd="islands", again_from=str(of_two.folder / "step_3"))


def test_islands_train_apart_and_meet(of_two):
    found = results(of_two)
    assert_same_bits(found, results(of_two, process=1))
    assert found["variable/OuterOptimizer/inner_step"] == 6
    assert found["losses"][-1] < found["losses"][0]
    # Six steps end with a round.
    for name in ("w", "v"):
        for island in found[f"variable/{name}/island"]:
            np.testing.assert_array_equal(island, found[f"variable/{name}"])
    first, second = found["variable/w_slot_v/island"]
    assert job.ROUND == 2
    assert np.abs(first - second).max() > 0
    assert np.abs(found["variable/w/quantization_error"]).max() > 0


def test_one_process_and_another_restart_have_the_same_bits(of_two, of_one):
    """Sums inside and between islands have two terms, whose order changes no bit."""
    whole = results(of_two)
    # That of the loss, which nothing follows from, has one of each island and replica.
    losses = whole.pop("losses")
    for run, first in (("", 0), ("again/", 3)):  # from the middle of a round
        found = results(of_one, run=run)
        np.testing.assert_allclose(found.pop("losses"), losses[first:], rtol=4 * 2**-23)
        assert_same_bits(whole, found)
