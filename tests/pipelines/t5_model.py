"""T5's `MtfModel` on pages of Python's documentation, set up by gin alone."""

from __future__ import annotations

import pydoc_data.topics
import textwrap
from pathlib import Path

import gin

from examples.run_t5 import without_torch
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes._common import configs_dir
from tests.pipelines.losses import on_cpu_devices

without_torch()
import mesh_tensorflow.transformer  # noqa: E402
import seqio  # noqa: E402
import t5.evaluation.metrics  # noqa: E402
import t5.models  # noqa: E402

BATCH, LENGTH = 8, 16
VOCABULARY = seqio.ByteVocabulary()
TASK, LM_TASK = "pages", "pages_lm"

DEFAULTS = Path(mesh_tensorflow.transformer.__file__).parent / "gin" / "defaults.gin"
SEARCH_PATHS = [Path(t5.models.__file__).parent / "gin", configs_dir()]

# A user's gin file, small.
_TINY = """
include "models/t5.1.1.tiny.gin"
include "t5_gradsync.gin"
num_layers = 1
d_kv = 16
mesh_train_dataset_fn.shuffle = False
mesh_train_dataset_fn.pack = False
"""

MODEL = f"""{_TINY}
MtfModel.mesh_shape = "batch:2"
MtfModel.mesh_devices = ["CPU:0", "CPU:1"]
MtfModel.sequence_length = {{"inputs": {LENGTH}, "targets": {LENGTH}}}
MtfModel.batch_size = {BATCH}
MtfModel.iterations_per_loop = 1
MtfModel.save_checkpoints_steps = 1000
MtfModel.learning_rate_schedule = 0.05
"""

COMMAND_GIN = f"""
include "dataset.gin"
{_TINY}
MIXTURE_NAME = "{TASK}"
utils.run.mesh_shape = "batch:2"
utils.run.mesh_devices = ["CPU:0", "CPU:0"]
utils.run.sequence_length = {{"inputs": {LENGTH}, "targets": {LENGTH}}}
utils.run.batch_size = {BATCH}
utils.run.learning_rate_schedule = @per_update()
per_update.schedule = @learning_rate_schedules.learning_rate_schedule_noam
"""

LANGUAGE_MODEL = 'MtfModel.model_type = "lm"\n'


def pages():
    """As many texts as a batch takes, so that every step has the same."""
    texts = [" ".join(text.split()) for text in pydoc_data.topics.topics.values()]
    texts = [text for text in texts if len(text) > 2 * LENGTH and text.isascii()][:BATCH]
    end = LENGTH - 1  # room for the end of the sequence
    return {"inputs": [t[:end] for t in texts], "targets": [t[end : 2 * end] for t in texts]}


def _dataset(split, shuffle_files, seed=None):
    del split, shuffle_files, seed
    return tf.data.Dataset.from_tensor_slices(pages())


def _add_task(name, features):
    if name in seqio.TaskRegistry.names():
        return
    seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(_dataset, splits=["train", "validation"]),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features={name: seqio.Feature(VOCABULARY) for name in features},
        metric_fns=[t5.evaluation.metrics.sequence_accuracy],
    )


_add_task(TASK, ["inputs", "targets"])
_add_task(LM_TASK, ["targets"])


class MtfModel(t5.models.MtfModel):
    """T5's, in sessions with a seed and with a device for each processor of the mesh.

    Attributes:
      losses: of the steps trained, in order.
    """

    def estimator(self, *args, **kwargs):
        estimator = super().estimator(*args, **kwargs)
        self.losses = on_cpu_devices(estimator, self._mesh_shape.size)
        return estimator


def mtf_model(model_dir, *bindings):
    """A model as T5's main makes it: from gin's defaults, then the user's files and bindings.

    Args:
      model_dir: its folder.
      *bindings: gin text, after `MODEL`.
    """
    gin.clear_config()
    for path in SEARCH_PATHS:
        gin.add_config_file_search_path(str(path))
    gin.parse_config_file(str(DEFAULTS))
    gin.parse_config([MODEL, *map(textwrap.dedent, bindings)])
    return MtfModel(str(model_dir), tpu=None)
