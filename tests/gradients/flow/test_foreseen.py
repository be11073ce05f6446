"""What the plan foresees of sums over the mesh is what the lowering meets, for any operation."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.shards import mixed_gradients
from tests import harness
from tests.gradients.flow import programs
from tests.gradients.flow.foreseen import EPS, check_foreseen

MESH, LAYOUT, _ = harness.MESHES["2x2"]
AXES = gs.ReplicaAxes(MESH, LAYOUT)
STEPS = 8
NOT_FINITE = 2.0**40


def no_nan(x):
    """A number for what is none: a SIMD mesh gathers by sums, which spread a NaN."""
    return tf.where_v2(tf.math.is_finite(x), x, tf.cast(NOT_FINITE, x.dtype))


def build_on(choices, shards):
    """A `harness.Build` of a program's tensors, whole and, where it can be had, shard by shard."""

    def build(mesh, inputs):
        targets = programs.Program(choices, mesh, inputs).grow(STEPS)
        fetches = {f"whole{i}": t for i, t in enumerate(gs.sum_shards(targets))}
        mixed = mixed_gradients(targets, AXES) if shards else targets
        own = [None if i in mixed else t for i, t in enumerate(targets)] if shards else []
        for i, rows in enumerate(gs.per_shard(own, AXES) if shards else []):
            if rows is not None:
                fetches[f"shards{i}"] = mtf.cwise(no_nan, [rows])
        return [], fetches

    return build


@pytest.mark.slow
@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**31), st.sampled_from(["simd", "placement"]))
def test_foreseen_is_met_and_right(seed, kind):
    choices = np.random.RandomState(seed).randint(10**4, size=8 * STEPS)
    clean, broken = programs.feeds(AXES.num_shards)
    on_one = harness.run("placement", *harness.ONE, build_on(choices, False), [clean])
    found = harness.run(
        kind, MESH, LAYOUT, build_on(choices, True), [clean, broken], autostack=False
    )
    (expected,) = on_one.fetched
    assume(expected)
    check_foreseen(found.lowering)
    first, second = found.fetched
    for name, value in expected.items():
        atol = EPS[kind] * max(1.0, np.max(np.abs(value)))
        np.testing.assert_allclose(first[name], value, rtol=0, atol=atol, err_msg=name)
        shards = first.get(name.replace("whole", "shards"))
        if shards is not None:
            parts = shards.reshape(-1, *value.shape) if AXES.num_shards > 1 else shards
            assert parts.shape[0] == AXES.num_shards
            atol = EPS[kind] * max(1.0, np.max(np.abs(parts)))
            np.testing.assert_allclose(parts.sum(0), value, rtol=0, atol=atol, err_msg=name)
            others = second[name.replace("whole", "shards")].reshape(parts.shape)
            # What the others have is none of the first one's business.
            np.testing.assert_allclose(others[0], parts[0], rtol=0, atol=atol, err_msg=name)
