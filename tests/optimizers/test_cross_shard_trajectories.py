"""CrossShardOptimizer trains as one processor does, on every mesh, and the same each time."""

import functools
import itertools

import numpy as np
import pytest

import mtf_gradsync as gs
from tests import harness, models, reference

STEPS = 5
# A step adds rounding of a few float32 ulp to values around 1; Adam and Adafactor divide by the
# root of small second moments, which passes relative errors of the gradient on undiminished.
TOLERANCE = STEPS * 16 * np.finfo(np.float32).eps


@functools.lru_cache(maxsize=None)
def program(kind, mesh, optimizer):
    """The model's training step, for several runs."""
    mesh_shape, layout, batch_dims = {"one": (*harness.ONE, ["batch"]), **harness.MESHES}[mesh]
    make = models.OPTIMIZERS[optimizer]
    build = models.train(lambda: gs.CrossShardOptimizer(make()), batch_dims)
    (feed,) = models.mlp_batches(1)
    return harness.built(kind, mesh_shape, layout, build, feed, grappler=True)


@functools.lru_cache(maxsize=None)
def one_processor(optimizer):
    """One processor, gated too: bare Mesh-TF races even there (docs/races.md)."""
    return program("placement", "one", optimizer).run(models.mlp_batches(STEPS))


OPTIMIZERS = sorted(models.OPTIMIZERS)
# Every optimizer on a mesh of two axes, and on another one; fewer processors of a placement mesh.
CASES = [
    *itertools.product(["4x2"], OPTIMIZERS),
    *harness.pairs(["4", "2x2x2"], OPTIMIZERS),
]
ON_PLACEMENT = [*itertools.product(["2x2"], OPTIMIZERS), ("2x2x2", "sgd")]


@pytest.mark.parametrize(("kind", "mesh", "optimizer"), harness.on_both(CASES, ON_PLACEMENT))
@pytest.mark.mostly_slow
def test_trajectory_equals_one_processor(kind, mesh, optimizer):
    feeds = models.mlp_batches(STEPS)
    result = program(kind, mesh, optimizer).run(feeds)
    reference.assert_close(result.variables, reference.train(optimizer, feeds), TOLERANCE)
    expected = one_processor(optimizer)
    assert sorted(result.variables) == sorted(expected.variables)
    reference.assert_close(result.variables, expected.variables, TOLERANCE)
    for step, other in zip(result.fetched, expected.fetched):
        np.testing.assert_allclose(step["loss"], other["loss"], rtol=TOLERANCE)


@pytest.mark.parametrize(("optimizer", "autostack"), [("adafactor", False), ("momentum", True)])
@pytest.mark.mostly_slow
def test_trajectory_with_shuffled_cores_and_without_stacking(optimizer, autostack):
    feeds = models.mlp_batches(STEPS)
    result = harness.run(
        "simd",
        *harness.MESHES["4x2"][:2],
        models.train(lambda: gs.CrossShardOptimizer(models.OPTIMIZERS[optimizer]())),
        feeds,
        autostack=autostack,
        logical_to_physical=harness.SHUFFLED,
    )
    reference.assert_close(result.variables, reference.train(optimizer, feeds), TOLERANCE)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.slow
def test_twenty_runs_are_bitwise_the_same(optimizer):
    """In several sessions: each may rewrite the graph in another way."""
    made, feeds = program("placement", "2x2", optimizer), models.mlp_batches(5)
    first, *others = (result for _ in range(4) for result in made.runs(feeds, 5))
    for other in others:
        for name, value in first.variables.items():
            assert value.tobytes() == other.variables[name].tobytes(), name
        for step, expected in zip(other.fetched, first.fetched):
            assert step["loss"].tobytes() == expected["loss"].tobytes()
