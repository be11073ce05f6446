"""`utils.run` as its command line starts it: its own defaults, then the files of `--gin_file`.

An encoder and a decoder with bfloat16 activations, which are the defaults, in microbatches, under
stacks of wrappers that `test_utils_run.py` does not have.
"""

from __future__ import annotations

import functools
import textwrap

import gin
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from mtf_gradsync import session_config
from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE, tf

if not ESTIMATOR_AVAILABLE:
    pytest.skip("utils.run trains by Estimator", allow_module_level=True)
from tests.pipelines.utils_run import Losses, Vocabulary

# isort: split
from mesh_tensorflow.transformer import utils

UPDATES = 3
MODEL = """
    num_layers = 1
    d_model = 16
    d_ff = 32
    num_heads = 2
    d_kv = 8
    dropout_rate = 0.0
    EncDecAttention.num_heads = 2
    EncDecAttention.key_value_size = 8
    utils.run.sequence_length = {"inputs": 8, "targets": 8}
    utils.run.batch_size = 8
    utils.run.iterations_per_loop = 1
    utils.run.mesh_shape = "batch:2;model:2"
    utils.run.mesh_devices = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    utils.run.learning_rate_schedule = 0.01
    utils.run.train_dataset_fn = @one_batch
    utils.run.train_model_fn = @train_with_a_seed
    utils.get_variable_dtype.master_dtype = "float32"
    utils.serialize_num_microbatches.tokens_per_microbatch_per_replica = 16
"""
INNER = """
    import mtf_gradsync
    utils.run.optimizer = @AdamWeightDecayOptimizer
    AdamWeightDecayOptimizer.epsilon = 1e-3
"""
# No norm reaches this: clipping by it changes nothing.
CLIP = """
    ClipByGlobalNormOptimizer.opt = @AdamWeightDecayOptimizer
    ClipByGlobalNormOptimizer.clip_norm = 1e6
"""
# How many micro steps make an update, and the bindings.
STACKS = {
    "clip": (1, f"{CLIP}\n    utils.run.optimizer = @ClipByGlobalNormOptimizer"),
    "accumulate (cross shard (clip))": (
        2,
        f"""{CLIP}
    utils.run.optimizer = @GradientAccumulationOptimizer
    GradientAccumulationOptimizer.opt = @CrossShardOptimizer
    GradientAccumulationOptimizer.backward_passes_per_step = 2
    GradientAccumulationOptimizer.average_aggregated_gradients = True
    GradientAccumulationOptimizer.accumulate = "local"
    CrossShardOptimizer.opt = @ClipByGlobalNormOptimizer
    """,
    ),
    "sync replicas (clip)": (
        1,
        f"""{CLIP}
    utils.run.optimizer = @SyncReplicasOptimizer
    SyncReplicasOptimizer.opt = @ClipByGlobalNormOptimizer
    SyncReplicasOptimizer.replicas_to_aggregate = 2
    """,
    ),
}
# Gradients are sums of rounded terms; the losses are printed in float32.
TOLERANCE = 2.0**-8


@gin.configurable(module="tests.pipelines.gin_files")
def train_with_a_seed(estimator, *args, **kwargs):
    """The pipeline's own `train_model`, with a seed and several CPU devices."""
    # The pipeline has no argument for either.
    estimator._session_config.CopyFrom(session_config(num_cpu_devices=4))
    estimator._config = estimator._config.replace(tf_random_seed=1)
    train = estimator.train
    estimator.train = lambda **given: train(**{**given, "hooks": [*given["hooks"], _hook]})
    utils.train_model(estimator, *args, **kwargs)


_hook = Losses()


def run(folder, *files, **arguments):
    """What ``mesh_tensorflow/transformer/main.py`` does, with gin files of these texts.

    Args:
      folder: for the files and the model.
      *files: gin text.
      **arguments: bindings of `utils.run`, as ``--gin_param``.

    Returns:
      The losses of the training steps.
    """
    paths = [folder / f"{number}.gin" for number in range(len(files))]
    for path, text in zip(paths, files):
        path.write_text(textwrap.dedent(text))
    params = [f"utils.run.{name} = {value!r}" for name, value in arguments.items()]
    _hook.values = []
    gin.clear_config()
    with flagsaver.flagsaver(gin_file=list(map(str, paths)), gin_param=params):
        flags.FLAGS.mark_as_parsed()
        utils.parse_gin_defaults_and_flags()
    try:
        model_dir = str(folder / "model")
        utils.run(None, None, None, None, model_dir=model_dir, vocabulary=Vocabulary())
    finally:
        with gin.unlock_config():
            gin.clear_config()
    return _hook.values


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Losses with the inner optimizer alone."""

    @functools.lru_cache(maxsize=None)
    def losses():
        return run(tmp_path_factory.mktemp("bare"), MODEL, INNER, train_steps=UPDATES)

    return losses


@pytest.mark.parametrize("stack", STACKS)
def test_losses_are_those_of_the_bare_pipeline(bare, tmp_path, stack):
    passes, bindings = STACKS[stack]
    found = run(tmp_path, MODEL, INNER, bindings, train_steps=UPDATES * passes)
    # Every micro step has the same batch.
    np.testing.assert_allclose(found, np.repeat(bare(), passes), rtol=TOLERANCE)
    assert found[-1] < 0.98 * found[0]
    names = {name for name, _ in tf.train.list_variables(str(tmp_path / "model"))}
    assert any(name.startswith("encoder/") for name in names)
    assert any(name.startswith("decoder/") for name in names)
