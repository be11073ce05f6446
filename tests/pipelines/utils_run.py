"""Runs Mesh-TensorFlow's own training pipeline, `transformer.utils.run`, by gin alone."""

from __future__ import annotations

import textwrap

import gin
import numpy as np

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.tools.train.config import transformer_models
from tests.pipelines.losses import on_cpu_devices

transformer_models()  # checks the version, and imports it
from mesh_tensorflow.transformer import utils  # noqa: E402

BATCH, LENGTH, VOCAB = 8, 8, 32
DEVICES = 4

PIPELINE = """
import mesh_tensorflow.optimize
import mesh_tensorflow.transformer.transformer
import mesh_tensorflow.transformer.transformer_layers

include "configs/unitransformer.gin"
num_layers = 1
d_model = 16
d_ff = 32
num_heads = 2
d_kv = 8
Unitransformer.max_length = 8

utils.run.model_type = "lm"
utils.run.sequence_length = {"targets": 8}
utils.run.batch_size = 8
utils.run.save_checkpoints_steps = 4
utils.run.iterations_per_loop = 1
utils.run.eval_checkpoint_step = -1
utils.run.mesh_shape = "batch:2;model:2"
utils.run.layout_rules = "batch:batch,d_ff:model,heads:model,vocab:model"
utils.run.mesh_devices = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
utils.run.learning_rate_schedule = 0.01
utils.run.train_dataset_fn = @one_batch
utils.run.train_model_fn = @train_on_cpu_devices
utils.get_variable_dtype.master_dtype = "float32"
utils.get_variable_dtype.slice_dtype = "float32"
utils.get_variable_dtype.activation_dtype = "float32"
utils.serialize_num_microbatches.tokens_per_microbatch_per_replica = None
"""

TWO_DEVICES = """
utils.run.mesh_shape = "batch:2"
utils.run.layout_rules = "batch:batch"
utils.run.mesh_devices = ["CPU:0", "CPU:1"]
"""

# On half as many devices, as it is twice as large.
BITRANSFORMER = (
    TWO_DEVICES
    + """
utils.run.model_type = "bitransformer"
utils.run.sequence_length = {"inputs": 8, "targets": 8}
transformer.make_bitransformer.encoder_name = "encoder"
transformer.make_bitransformer.decoder_name = "decoder"
encoder/transformer.make_layer_stack.layers = [
    @transformer_layers.SelfAttention, @transformer_layers.DenseReluDense]
decoder/transformer.make_layer_stack.layers = [
    @transformer_layers.SelfAttention, @transformer_layers.EncDecAttention,
    @transformer_layers.DenseReluDense]
EncDecAttention.num_heads = 2
EncDecAttention.key_value_size = 8
EncDecAttention.dropout_rate = 0.0
"""
)

BFLOAT16 = 'utils.get_variable_dtype.activation_dtype = "bfloat16"\n'
MICROBATCHES = "utils.serialize_num_microbatches.tokens_per_microbatch_per_replica = 16\n"


class Vocabulary:
    """Letters from "a" on, as numbers from 2 on."""

    vocab_size = VOCAB

    def encode(self, text):
        """The letters' numbers."""
        return [2 + ord(letter) - ord("a") for letter in text]

    def decode(self, ids):
        """The letters of numbers; what is none is left out."""
        return "".join(chr(ord("a") + i - 2) for i in ids if i >= 2)


@gin.configurable(module="tests.pipelines")
def one_batch(sequence_length, vocabulary, dataset_split):
    """The same batch in every step."""
    del vocabulary, dataset_split
    random = np.random.RandomState(0)
    words = {
        name: random.randint(1, VOCAB, (BATCH, LENGTH)).astype(np.int32) for name in sequence_length
    }
    return tf.data.Dataset.from_tensor_slices(words)


_losses: list[float] = []


@gin.configurable(module="tests.pipelines")
def train_on_cpu_devices(estimator, vocabulary, *args, **kwargs):
    """The pipeline's own `train_model`, in a session of several CPU devices."""
    losses = on_cpu_devices(estimator, DEVICES)
    utils.train_model(estimator, vocabulary, *args, **kwargs)
    _losses.extend(losses)


def run(model_dir, *bindings, **arguments):
    """Runs the pipeline.

    Args:
      model_dir: its folder.
      *bindings: gin text, after `PIPELINE`.
      **arguments: bindings of `utils.run` alone.

    Returns:
      The losses of the training steps.
    """
    _losses.clear()
    gin.clear_config()
    try:
        gin.parse_config([PIPELINE, *map(textwrap.dedent, bindings)])
        for name, value in arguments.items():
            gin.bind_parameter(f"utils.run.{name}", value)
        utils.run(
            tpu_job_name=None,
            tpu=None,
            gcp_project=None,
            tpu_zone=None,
            model_dir=str(model_dir),
            vocabulary=Vocabulary(),
        )
    finally:
        gin.clear_config()
    return list(_losses)
