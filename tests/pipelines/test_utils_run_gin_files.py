"""`utils.run` as its command line starts it: its own defaults, then the files of `--gin_file`.

An encoder and a decoder with bfloat16 activations, which are the defaults, under replicas that may
sit out.
"""

from __future__ import annotations

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
from tests.pipelines.losses import Losses
from tests.pipelines.utils_run import Vocabulary

# isort: split
from mesh_tensorflow.transformer import utils

UPDATES = 2
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
    utils.run.mesh_shape = "batch:2"
    utils.run.mesh_devices = ["CPU:0", "CPU:1"]
    utils.run.learning_rate_schedule = 0.01
    utils.run.train_dataset_fn = @one_batch
    utils.run.train_model_fn = @train_with_a_seed
    utils.get_variable_dtype.master_dtype = "float32"
    utils.serialize_num_microbatches.tokens_per_microbatch_per_replica = None
"""
INNER = """
    import mtf_gradsync
    utils.run.optimizer = @AdamWeightDecayOptimizer
    AdamWeightDecayOptimizer.epsilon = 1e-3
"""
# No norm reaches this: clipping by it changes nothing.
SYNC_REPLICAS = """
    utils.run.optimizer = @SyncReplicasOptimizer
    SyncReplicasOptimizer.opt = @ClipByGlobalNormOptimizer
    SyncReplicasOptimizer.replicas_to_aggregate = 2
    ClipByGlobalNormOptimizer.opt = @AdamWeightDecayOptimizer
    ClipByGlobalNormOptimizer.clip_norm = 1e6
"""
# The losses are bfloat16 numbers: by one unit in the last place.
TOLERANCE = 2.0**-7


@gin.configurable(module="tests.pipelines.gin_files")
def train_with_a_seed(estimator, *args, **kwargs):
    """The pipeline's own `train_model`, with a seed and several CPU devices."""
    # The pipeline has no argument for either.
    estimator._session_config.CopyFrom(session_config(num_cpu_devices=2))
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
        # Which unlocks it, too: other tests register more.
        gin.clear_config()
    return _hook.values


@pytest.mark.slow
def test_losses_are_those_of_the_bare_pipeline(tmp_path_factory):
    bare, wrapped = (tmp_path_factory.mktemp(name) for name in ("bare", "wrapped"))
    losses = run(bare, MODEL, INNER, train_steps=UPDATES)
    found = run(wrapped, MODEL, INNER, SYNC_REPLICAS, train_steps=UPDATES)
    np.testing.assert_allclose(found, losses, rtol=TOLERANCE)
    assert losses[-1] < 0.98 * losses[0]
    names = {name for name, _ in tf.train.list_variables(str(wrapped / "model"))}
    assert {"sync_replicas/local_step", "shared/embedding"} <= names
