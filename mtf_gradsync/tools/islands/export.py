"""Exports a version of the islands' values as a TensorFlow checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from mtf_gradsync.extension import tf
from mtf_gradsync.tools.islands.changes import MEAN
from mtf_gradsync.tools.islands.folder import DamagedObjectError, Folder
from mtf_gradsync.tools.islands.versions import MergeSettings, newest_version, read_version


def export_version(
    folder: Folder, directory: str | os.PathLike[str], version: int | None = None
) -> str:
    """Writes a version's values as a checkpoint, which `train`, Estimator and Saver restore.

    It has the variables that islands exchange and the global step; slots begin anew.

    Args:
      folder: of the islands.
      directory: where the checkpoint goes.
      version: which one; None is the newest.

    Returns:
      The path of the checkpoint.

    Raises:
      DamagedObjectError: there is no such version, or it cannot be read.
    """
    number = newest_version(folder) if version is None else version
    settings = MergeSettings.of(folder)
    if number is None or settings is None:
        raise DamagedObjectError(f"{folder.url} has no versions yet: no merger has begun there.")
    values, decision = read_version(folder, number, settings.fragments)
    with tf.Graph().as_default(), tf.Session() as session:
        for name, value in values.items():
            plain = name.removeprefix(MEAN)
            tf.get_variable(plain, initializer=tf.constant(value), use_resource=False)
        step = decision.counts.get("step", 0)
        if "global_step" not in values:
            tf.get_variable("global_step", initializer=tf.constant(step, tf.int64))
        session.run(tf.global_variables_initializer())
        Path(directory).mkdir(parents=True, exist_ok=True)
        return tf.train.Saver().save(
            session, os.path.join(directory, "model.ckpt"), global_step=step, write_meta_graph=False
        )
