"""Mesh-TensorFlow's own pipeline trains as it does bare, with wrappers chosen by gin alone.

The mesh is given once, to the pipeline.
"""

import functools

import numpy as np
import pytest

from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE

if not ESTIMATOR_AVAILABLE:
    pytest.skip("utils.run trains by Estimator", allow_module_level=True)
from tests.pipelines import utils_run

STEPS = 4
INNER = """
utils.run.optimizer = @AdamWeightDecayOptimizer
AdamWeightDecayOptimizer.epsilon = 1e-3
"""
# How many micro steps make an update, and the bindings.
WRAPPERS = {
    "cross shard": (
        1,
        """
        utils.run.optimizer = @CrossShardOptimizer
        CrossShardOptimizer.opt = @AdamWeightDecayOptimizer
        """,
    ),
    "accumulated on each shard": (
        2,
        """
        utils.run.optimizer = @GradientAccumulationOptimizer
        GradientAccumulationOptimizer.opt = @ClipByGlobalNormOptimizer
        GradientAccumulationOptimizer.backward_passes_per_step = 2
        GradientAccumulationOptimizer.average_aggregated_gradients = True
        GradientAccumulationOptimizer.accumulate = "local"
        ClipByGlobalNormOptimizer.opt = @AdamWeightDecayOptimizer
        ClipByGlobalNormOptimizer.clip_norm = 1e6
        """,
    ),
    "accumulated whole": (
        2,
        """
        utils.run.optimizer = @GradientAccumulationOptimizer
        GradientAccumulationOptimizer.opt = @CrossShardOptimizer
        GradientAccumulationOptimizer.backward_passes_per_step = 2
        GradientAccumulationOptimizer.average_aggregated_gradients = True
        CrossShardOptimizer.opt = @AdamWeightDecayOptimizer
        """,
    ),
    "sync replicas": (
        1,
        """
        utils.run.optimizer = @SyncReplicasOptimizer
        SyncReplicasOptimizer.opt = @AdamWeightDecayOptimizer
        SyncReplicasOptimizer.replicas_to_aggregate = 2
        """,
    ),
}
MODELS = {
    "unitransformer": "",
    "bfloat16": utils_run.BFLOAT16,
    "bitransformer, bfloat16": utils_run.BITRANSFORMER + utils_run.BFLOAT16,
    "bitransformer": utils_run.BITRANSFORMER,
    "microbatches": utils_run.MICROBATCHES,
}
# Losses near 4. Adam passes relative errors of gradients on to weights, at a rate of 0.01.
TOLERANCE = {"float32": STEPS * 16 * np.finfo(np.float32).eps, "bfloat16": 2.0**-8}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Losses with the inner optimizer alone."""

    @functools.lru_cache(maxsize=None)
    def losses(model):
        folder = tmp_path_factory.mktemp("bare")
        return utils_run.run(folder, MODELS[model], INNER, train_steps=STEPS)

    return losses


@pytest.mark.parametrize(
    ("model", "wrapper"),
    [
        *(("unitransformer", wrapper) for wrapper in WRAPPERS),
        ("bfloat16", "accumulated on each shard"),
        ("bitransformer, bfloat16", "cross shard"),
        ("bitransformer", "sync replicas"),
        ("microbatches", "cross shard"),
        ("microbatches", "accumulated whole"),
    ],
)
def test_losses_are_those_of_the_bare_pipeline(bare, tmp_path, model, wrapper):
    passes, bindings = WRAPPERS[wrapper]
    found = utils_run.run(tmp_path, MODELS[model], INNER, bindings, train_steps=STEPS * passes)
    assert len(found) == STEPS * passes
    tolerance = TOLERANCE["bfloat16" if "bfloat16" in model else "float32"]
    # Every micro step has the same batch.
    np.testing.assert_allclose(found, np.repeat(bare(model), passes), rtol=tolerance)
    assert found[-1] < 0.98 * found[0]
