"""How the benchmark of plans compares an order with a measurement."""

import itertools

import numpy as np
import pytest

from benchmarks import plan
from benchmarks.timing import Spread


def rows_of(predicted, measured, width=0.0):
    """Meshes with these times, whose quartiles lie `width` below and above."""

    def ranks(values):
        return [1 + sum(other < one for other in values) for one in values]

    return [
        {
            "predicted rank": rank,
            "measured rank": measured_rank,
            "measured ms": Spread(ms, ms - width, ms + width),
        }
        for rank, measured_rank, ms in zip(ranks(predicted), ranks(measured), measured)
    ]


@pytest.mark.slow
def test_tau_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.RandomState(0)
    for _ in range(20):
        predicted, measured = rng.rand(2, 12).tolist()
        pairs = list(itertools.combinations(rows_of(predicted, measured), 2))
        expected = stats.kendalltau(predicted, measured).statistic
        assert plan.kendall_tau(pairs) == pytest.approx(expected, abs=1e-12)


def test_meshes_are_apart_when_their_quartiles_are():
    near, far, farther = rows_of([1, 2, 3], [10.0, 11.0, 13.0], width=0.9)
    assert not plan.apart(near, far)
    assert not plan.apart(far, near)
    assert plan.apart(far, farther)
    assert plan.apart(farther, near)


def test_only_what_can_be_told_apart_counts_against_the_mesh_named_first():
    # The first is measured as the third, but only the last two are apart from the others.
    rows = rows_of([1, 2, 3, 4, 5], [10.2, 10.1, 10.0, 14.0, 13.0], width=0.4)
    values = {target.what: target.value for target in plan.targets_of("lm", rows)}
    # Of ten pairs four are in the wrong order: all three of the first meshes, and the last one.
    assert values["1 - Kendall's tau of lm, predicted and measured"] == pytest.approx(1 - 0.2)
    assert values["measured rank of the mesh of lm that is named first"] == 3
    sure = ", of what the measurement can tell apart"
    # Seven are apart, and the last two of these in the wrong order.
    assert values[f"1 - Kendall's tau of lm, predicted and measured{sure}"] == pytest.approx(2 / 7)
    assert values[f"measured rank of the mesh of lm that is named first{sure}"] == 1


def test_where_nothing_can_be_told_apart_nothing_is_wrong():
    assert plan.kendall_tau([]) == 1
