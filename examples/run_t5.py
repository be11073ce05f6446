"""T5's own command, `t5_mesh_transformer`, with optimizers of mtf_gradsync to choose by gin.

    python examples/run_t5.py --model_dir=runs/mine --module_import=my_tasks \\
        --gin_location_prefix=configs --gin_file=my_t5.gin

All flags are T5's. Copy this file: nothing in it is about a model. The guide "I have a T5 gin
file" (docs/guides/t5.md) describes the gin file.
"""

import importlib.util
import sys
import types

import mtf_gradsync  # noqa: F401 - first: makes Mesh-TensorFlow importable on TensorFlow 2.13+

# isort: split
import tensorflow.compat.v1 as tf
from absl import app


def without_torch():
    """Lets T5 be imported where there is no torch, which only its `HfPyTorchModel` needs."""
    if importlib.util.find_spec("torch") is None:
        module = types.ModuleType("t5.models.hf_model")
        module.HfPyTorchModel = None
        sys.modules[module.__name__] = module


if __name__ == "__main__":
    without_torch()
    from t5.models import mesh_transformer_main

    tf.disable_v2_behavior()
    # T5's own command uses ref variables, which an update may overwrite during a step.
    tf.enable_resource_variables()
    tf.logging.set_verbosity(tf.logging.INFO)
    app.run(mesh_transformer_main.main)
