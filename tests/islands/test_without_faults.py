"""Islands that all go on are those of `OuterOptimizer`: against outer steps in numpy float64."""

import numpy as np
import pytest

from mtf_gradsync.islands import MergeSettings, Waiting
from mtf_gradsync.islands.folder import Folder
from mtf_gradsync.islands.merger import replay
from tests.islands.conftest import Program, at_once, batches, merging, part_of
from tests.optimizers.outer import outer_reference

INNER, ROUNDS = 3, 10


@pytest.mark.parametrize(
    ("kinds", "opt"),
    [
        (("simd", "simd"), "sgd"),
        (("placement", "simd"), "adam"),
        pytest.param(("xla", "placement"), "sgd", marks=pytest.mark.xla),
    ],
)
def test_two_islands_are_those_of_numpy(kinds, opt, folder):
    feeds = batches(INNER * ROUNDS)
    programs = [
        Program(kind, "2", opt, part_of(feeds, n, 2)[0], folder, f"island-{n}", INNER)
        for n, kind in enumerate(kinds)
    ]
    with merging(folder, MergeSettings(0.7, 0.5), Waiting(quorum=2), keep_all=True):
        found = at_once(
            [lambda n=n, p=p: p.train(part_of(feeds, n, 2)) for n, p in enumerate(programs)]
        )
    expected = outer_reference.train(
        opt, feeds, 2, INNER, 0.7, 0.5, True, outer_reference.ALL
    ).outer
    for name, value in expected.items():
        # Each step rounds a gradient and an update a few times, relative to values of about 1.
        np.testing.assert_array_equal(found[0][name], found[1][name])
        np.testing.assert_allclose(found[0][name], value, rtol=0, atol=INNER * ROUNDS * 32 * 2**-24)
    assert replay(Folder(str(folder))) == []
