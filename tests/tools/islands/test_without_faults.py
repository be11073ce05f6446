"""Islands that all go on are those of `OuterOptimizer`: against outer steps in numpy float64."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync.islands import MergeSettings, Waiting
from mtf_gradsync.tools.islands.folder import Folder
from mtf_gradsync.tools.islands.versions import replay
from tests import harness, models
from tests.optimizers.outer import outer_reference
from tests.tools.islands.conftest import Program, at_once, batches, merging, part_of

INNER, ROUNDS = 3, 10
RATE, MOMENTUM = 0.7, 0.5
# Each step rounds a gradient and an update a few times, relative to values of about 1.
ATOL = INNER * ROUNDS * 32 * 2**-24


def trained_apart(kinds, opt, folder, feeds, tokens=(lambda step: 1.0, lambda step: 1.0)):
    """Values that islands end with which have equal parts of the batches, and always wait.

    `tokens` is what a step of each stands for.
    """
    programs = [
        Program(kind, "2", opt, part_of(feeds, n, 2)[0], folder, f"island-{n}", INNER)
        for n, kind in enumerate(kinds)
    ]
    with merging(folder, MergeSettings(RATE, MOMENTUM), Waiting(quorum=2), keep_all=True):
        return at_once(
            [
                lambda n=n, p=p: p.train(part_of(feeds, n, 2), tokens[n])
                for n, p in enumerate(programs)
            ]
        )


def trained_in_one_program(kind, opt, feeds):
    """Values that `OuterOptimizer` with two islands of one core ends with."""
    shape, layout, dims = harness.MESHES["2"]
    where = {"mesh_shape": shape, "layout": layout, "batch_dims": dims}

    def make():
        inner = models.OPTIMIZERS[opt]()
        return gs.OuterOptimizer(
            inner, INNER, outer_learning_rate=RATE, outer_momentum=MOMENTUM, **where
        )

    return harness.run(kind, shape, layout, models.train(make, dims), feeds).variables


def in_numpy(opt, feeds, weights=(1.0, 1.0)):
    """Values that two islands in float64 end with."""

    def mean(name, mask, parts):
        return np.average(parts, axis=0, weights=weights)

    return outer_reference.train(
        opt, feeds, 2, INNER, RATE, MOMENTUM, True, outer_reference.ALL, mean=mean
    ).outer


@pytest.mark.parametrize(
    ("kinds", "opt"),
    [
        (("simd", "simd"), "sgd"),
        (("placement", "simd"), "adam"),
        pytest.param(("xla", "placement"), "sgd", marks=pytest.mark.xla),
    ],
)
@pytest.mark.mostly_slow
def test_two_islands_are_those_of_numpy(kinds, opt, folder):
    feeds = batches(INNER * ROUNDS)
    found = trained_apart(kinds, opt, folder, feeds)
    for name, value in in_numpy(opt, feeds).items():
        np.testing.assert_array_equal(found[0][name], found[1][name])
        np.testing.assert_allclose(found[0][name], value, rtol=0, atol=ATOL)
    assert replay(Folder(str(folder))) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "opt"),
    [
        ("placement", "adam"),
        ("simd", "adafactor"),
        pytest.param("xla", "sgd", marks=pytest.mark.xla),
        pytest.param("xla", "adafactor", marks=pytest.mark.xla),
    ],
)
def test_two_islands_are_those_of_one_program(kind, opt, folder):
    feeds = batches(INNER * ROUNDS)
    found, _ = trained_apart([kind, kind], opt, folder, feeds)
    inside = trained_in_one_program(kind, opt, feeds)
    for name, value in in_numpy(opt, feeds).items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=ATOL)
        np.testing.assert_allclose(found[name], inside[name], rtol=0, atol=2 * ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_islands_are_weighted_by_their_tokens(kind, folder):
    feeds = batches(INNER * ROUNDS)
    tokens = (lambda step: 1.0 + step % 3, lambda step: 17.0)
    found, _ = trained_apart([kind, kind], "adam", folder, feeds, tokens)
    for name, value in in_numpy("adam", feeds, [6.0, 51.0]).items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=ATOL)
