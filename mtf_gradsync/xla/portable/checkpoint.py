"""Writes an exported step's values as a checkpoint, from which any runtime can continue."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.xla.runner.files import (
    VALUES,
    assemble,
    dtype_of,
    key_of,
    read_manifest,
    with_dtype,
)


def to_checkpoint(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> str:
    """Writes the values of an exported step as a checkpoint. It needs no model.

    Args:
      folder: a folder that `export` or its runner wrote.
      path: prefix of the checkpoint's files.

    Returns:
      The path to give to ``restore``; programs with the same variables can read it, on another
      mesh, on another runtime or without a mesh. The step counter (``tf.train.get_global_step``),
      where it stands outside the program, counts the runner's steps.

    Raises:
      StepError: when a file is missing or damaged.
    """
    manifest = read_manifest(Path(folder))
    found: dict[str, np.ndarray] = {}
    with np.load(Path(folder) / VALUES, allow_pickle=False) as file:
        for name, dtype in manifest["others"].items():
            found[name] = with_dtype(file[f"others/{name}"], dtype)
        for p in manifest["parameters"]:
            if p["kind"] == "variable":
                stored = with_dtype(file[key_of(p)], p["dtype"])
                dtype = dtype_of(p["whole"]["dtype"] if p["whole"] else p["dtype"])
                for name, value in assemble(p, [stored[row] for row in p["rows"]]).items():
                    found[name] = value.astype(dtype)
    counter = manifest["counter"]
    if counter in manifest["others"]:
        found[counter] = np.asarray(found[counter] + manifest["steps"], found[counter].dtype)
    names = sorted(found)
    with tf.Graph().as_default() as graph, tf.Session(graph=graph) as session:
        tensors = [tf.placeholder(found[n].dtype, found[n].shape) for n in names]
        save = tf.raw_ops.SaveV2(
            prefix=os.fspath(path),
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            tensors=tensors,
        )
        session.run(save, dict(zip(tensors, (found[n] for n in names))))
    return os.fspath(path)
