"""Writes a model as a SavedModel, which loads without this package and without a mesh's devices."""

from __future__ import annotations

import os
import time
from typing import Any, Mapping

from mtf_gradsync._private.libraries import tf


def new_directory(base: str) -> str:
    """Returns the path of a new directory, named by the time in seconds: newer names sort last."""
    while True:
        path = os.path.join(base, str(int(time.time())))
        if not tf.io.gfile.exists(path):
            return path
        time.sleep(1)


def write_saved_model(
    directory: str,
    spec: Any,
    scaffold: tf.train.Scaffold | None,
    inputs: Mapping[str, tf.Tensor],
    checkpoint: str,
) -> None:
    """Writes the default graph with a checkpoint's values to a new directory.

    A server feeds `inputs`, and runs the scaffold's local_init_op where it loads the model.
    """
    saver = tf.train.Saver(sharded=True)
    begin = scaffold.local_init_op if scaffold else None
    if begin is None:
        begin = tf.train.Scaffold.default_local_init_op()
    exported = spec.export_outputs or {"serving_default": spec.predictions}
    signatures = {
        name: tf.saved_model.predict_signature_def(
            dict(inputs), _by_name(getattr(output, "outputs", output))
        )
        for name, output in exported.items()
    }
    builder = tf.saved_model.Builder(directory)
    with tf.Session() as session:
        saver.restore(session, checkpoint)
        session.run(begin)
        builder.add_meta_graph_and_variables(
            session,
            [tf.saved_model.SERVING],
            signature_def_map=signatures,
            main_op=begin,
            saver=saver,
            strip_default_attrs=True,
        )
    builder.save()


def _by_name(output: Any) -> dict[str, tf.Tensor]:
    return dict(output) if isinstance(output, Mapping) else {"output": output}
