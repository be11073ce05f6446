"""ShardedUpdateOptimizer around an optimizer of a user's own, in a program like GPT-Neo's."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference
from tests.optimizers.sharded_updates import small_model
from tests.optimizers.sharded_updates.adam_by_name import RATE, AdamByName, in_numpy, step
from tests.optimizers.sharded_updates.small_model import assert_same_bits, batches, sharded

STEPS, NORM, MESH = 3, 0.2, "2x2"
# As for CrossShardOptimizer's trajectories.
TOLERANCE = STEPS * 16 * np.finfo(np.float32).eps


def make():
    # GPT-Neo's schedules make a tensor of the rate.
    return AdamByName(tf.constant(RATE))


@pytest.mark.parametrize(
    "kind", ["own memories", "simd", pytest.param("xla", marks=pytest.mark.xla)]
)
@pytest.mark.mostly_slow
def test_trajectory(kind):
    shape, layout, _ = small_model.MESHES[MESH]
    feeds = models.mlp_batches(STEPS)

    def build(mesh, inputs):
        return step(sharded(make(), MESH), models.mlp_loss(mesh, inputs), NORM), {}

    with small_model.memories_of(kind) as kind:
        result = harness.run(kind, shape, layout, build, feeds)
    update = in_numpy(NORM)
    expected = reference.train(update, feeds)
    assert update.clipped
    for name, m in update.update.m.items():
        v = update.update.v[name]
        expected.update({f"{name}/adam_m": m, f"{name}/adam_v": v})
    small_model.assert_close(result.variables, expected, TOLERANCE)


@pytest.mark.slow
def test_bits_with_narrow_slices():
    """Masters and slots are float32, what a core computes with is bfloat16."""
    dtype = mtf.VariableDType(tf.float32, tf.bfloat16, tf.bfloat16)
    shape, layout, _ = small_model.MESHES[MESH]
    feeds, found = batches(2), []
    for wrap in (lambda opt: sharded(opt, MESH), gs.CrossShardOptimizer):

        def build(mesh, inputs, wrap=wrap):
            loss = small_model.loss_of(mesh, inputs, dtype=dtype)
            return step(wrap(make()), loss, NORM, dtype.slice_dtype), {}

        with small_model.memories_of("own memories") as where:
            found.append(harness.run(where, shape, layout, build, feeds).variables)
    assert_same_bits(*found)
