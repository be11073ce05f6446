"""Mesh-TensorFlow's own command, with optimizers of mtf_gradsync to choose by gin.

    python examples/run_mtf.py --model_dir=runs/mine --module_import=my_data --gin_file=mine.gin

All flags are those of `python -m mesh_tensorflow.transformer.main`, which by itself cannot be
imported on TensorFlow 2.13 and later. Copy this file: nothing in it is about a model. The guide "I
have a T5 gin file" (docs/guides/t5.md) describes the gin file.
"""

import mtf_gradsync  # noqa: F401 - first: makes Mesh-TensorFlow importable on TensorFlow 2.13+

# isort: split
import tensorflow.compat.v1 as tf
from absl import app
from mesh_tensorflow.transformer import main

if __name__ == "__main__":
    tf.disable_v2_behavior()
    # The command itself uses ref variables, which an update may overwrite during a step.
    tf.enable_resource_variables()
    tf.logging.set_verbosity(tf.logging.INFO)
    app.run(main.main)
