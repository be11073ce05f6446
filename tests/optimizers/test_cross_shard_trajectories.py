"""CrossShardOptimizer trains as one processor does, on every mesh, and the same each time."""

import numpy as np
import pytest

import mtf_gradsync as gs
from tests import harness, models, reference

STEPS = 5
# A step adds rounding of a few float32 ulp to values around 1; Adam and Adafactor divide by the
# root of small second moments, which passes relative errors of the gradient on undiminished.
TOLERANCE = STEPS * 16 * np.finfo(np.float32).eps


def assert_same_variables(actual, expected, tolerance=TOLERANCE):
    for name in expected:
        np.testing.assert_allclose(
            actual[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


@pytest.fixture(scope="module")
def one_processor():
    """One processor, gated too: bare Mesh-TF races even there (docs/races.md)."""
    feeds = models.mlp_batches(STEPS)
    return {
        name: harness.run(
            "placement",
            *harness.ONE,
            models.train(lambda: gs.CrossShardOptimizer(make())),  # noqa: B023
            feeds,
        )
        for name, make in models.OPTIMIZERS.items()
    }


@pytest.mark.parametrize("optimizer", sorted(models.OPTIMIZERS))
@pytest.mark.parametrize("mesh", sorted(harness.MESHES))
def test_trajectory_equals_one_processor(mesh_kind, mesh, optimizer, one_processor):
    mesh_shape, layout, batch_dims = harness.MESHES[mesh]
    make = models.OPTIMIZERS[optimizer]
    feeds = models.mlp_batches(STEPS)
    result = harness.run(
        mesh_kind,
        mesh_shape,
        layout,
        models.train(lambda: gs.CrossShardOptimizer(make()), batch_dims),
        feeds,
    )
    assert_same_variables(result.variables, reference.train(optimizer, feeds))
    expected = one_processor[optimizer]
    assert sorted(result.variables) == sorted(expected.variables)
    assert_same_variables(result.variables, expected.variables)
    for step, other in zip(result.fetched, expected.fetched):
        np.testing.assert_allclose(step["loss"], other["loss"], rtol=TOLERANCE)


@pytest.mark.parametrize("optimizer", sorted(models.OPTIMIZERS))
@pytest.mark.parametrize("autostack", [True, False])
def test_trajectory_with_shuffled_cores_and_without_stacking(autostack, optimizer):
    mesh_shape, layout, _ = harness.MESHES["4x2"]
    feeds = models.mlp_batches(STEPS)
    result = harness.run(
        "simd",
        mesh_shape,
        layout,
        models.train(lambda: gs.CrossShardOptimizer(models.OPTIMIZERS[optimizer]())),
        feeds,
        autostack=autostack,
        logical_to_physical=harness.SHUFFLED,
    )
    assert_same_variables(result.variables, reference.train(optimizer, feeds))


@pytest.mark.parametrize("optimizer", sorted(models.OPTIMIZERS))
def test_twenty_runs_are_bitwise_the_same(optimizer):
    mesh_shape, layout, _ = harness.MESHES["4x2"]
    make = models.OPTIMIZERS[optimizer]
    results = harness.run(
        "placement",
        mesh_shape,
        layout,
        models.train(lambda: gs.CrossShardOptimizer(make())),
        models.mlp_batches(8),
        repeats=20,
    )
    first = results[0]
    for other in results[1:]:
        for name, value in first.variables.items():
            assert value.tobytes() == other.variables[name].tobytes(), name
        for step, expected in zip(other.fetched, first.fetched):
            assert step["loss"].tobytes() == expected["loss"].tobytes()
