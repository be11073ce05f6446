"""Mesh-TensorFlow's own pipeline trains as it does bare, with wrappers chosen by gin alone.

The mesh is given once, to the pipeline.
"""

import functools

import numpy as np
import pytest

from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE, tf

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
    "scaled": (
        1,
        """
        utils.run.optimizer = @LossScaleOptimizer
        LossScaleOptimizer.opt = @ClipByGlobalNormOptimizer
        ClipByGlobalNormOptimizer.opt = @AdamWeightDecayOptimizer
        ClipByGlobalNormOptimizer.clip_norm = 1e6
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
    "bitransformer, bfloat16": utils_run.BITRANSFORMER + utils_run.BFLOAT16,
    "microbatches": utils_run.TWO_DEVICES + utils_run.MICROBATCHES,
}
# Losses near 4. Adam passes relative errors of gradients on to weights, at a rate of 0.01.
TOLERANCE = {"float32": STEPS * 16 * np.finfo(np.float32).eps, "bfloat16": 2.0**-8}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Losses with the inner optimizer alone."""

    @functools.lru_cache(maxsize=None)
    def losses(model):
        folder = tmp_path_factory.mktemp("bare")
        return utils_run.run(folder, MODELS[model], INNER, train_steps=STEPS + 1)

    return losses


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory):
    """Losses with a wrapper, and the model's folder."""

    @functools.lru_cache(maxsize=None)
    def losses(model, wrapper):
        folder = tmp_path_factory.mktemp("wrapped")
        passes, bindings = WRAPPERS[wrapper]
        steps = STEPS * passes
        return utils_run.run(folder, MODELS[model], INNER, bindings, train_steps=steps), folder

    return losses


@pytest.mark.parametrize(
    ("model", "wrapper"),
    [
        ("unitransformer", "cross shard"),
        ("unitransformer", "accumulated on each shard"),
        ("unitransformer", "sync replicas"),
        ("bitransformer, bfloat16", "accumulated on each shard"),
        ("microbatches", "accumulated whole"),
        ("microbatches", "scaled"),
    ],
)
def test_losses_are_those_of_the_bare_pipeline(bare, wrapped, model, wrapper):
    passes, _ = WRAPPERS[wrapper]
    found, _ = wrapped(model, wrapper)
    assert len(found) == STEPS * passes
    tolerance = TOLERANCE["bfloat16" if "bfloat16" in model else "float32"]
    # Every micro step has the same batch.
    np.testing.assert_allclose(found, np.repeat(bare(model)[:STEPS], passes), rtol=tolerance)
    assert found[-1] < 0.98 * found[0]


def evaluated(model_dir):
    """What mode="perplexity_eval" has found, by name."""
    (events,) = model_dir.glob("eval_*/events*")
    values = [
        value
        for event in tf.train.summary_iterator(str(events))
        for value in event.summary.value
        if value.HasField("simple_value")
    ]
    return {value.tag: value.simple_value for value in values}


def test_evaluation_and_inference_read_what_a_wrapped_run_has_written(bare, wrapped, tmp_path):
    model, wrapper = "bitransformer, bfloat16", "accumulated on each shard"
    (tmp_path / "inputs").write_text("abc\nhello\n")
    _, folder = wrapped(model, wrapper)
    decoding = f"""
    decode_from_file.input_filename = "{tmp_path / "inputs"}"
    decode_from_file.output_filename = "{tmp_path / "outputs"}"
    """
    given = MODELS[model], INNER, WRAPPERS[wrapper][1], decoding
    utils_run.run(folder, *given, mode="perplexity_eval", perplexity_eval_steps=1)
    utils_run.run(folder, *given, mode="infer")
    # The loss of the step that would have come next.
    found = evaluated(folder)
    np.testing.assert_allclose(found["loss"], bare(model)[STEPS], rtol=TOLERANCE["bfloat16"])
    assert {"neg_log_perplexity", "token_accuracy"} < set(found)
    (outputs,) = tmp_path.glob("outputs-*")
    assert len(outputs.read_text().splitlines()) == 2
