"""Finds out whether a checkpoint is damaged, before anything depends on it."""

from __future__ import annotations

import os

from tqdm import tqdm

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.checkpoints.manifest import differs_from_manifest
from mtf_gradsync.runtimes.errors import first_line

# What TensorFlow's reader raises of a file that it cannot read.
UNREADABLE = (tf.errors.OpError, ValueError, LookupError, RuntimeError, TypeError, OSError)


def damage_of(path: str, of_a_run: bool = True) -> str | None:
    """Returns what is wrong with a checkpoint, in words; None if it is intact.

    All of it is read, so that TensorFlow compares checksums. `of_a_run` says whether it has to have
    a global step.
    """
    if not os.path.exists(f"{path}.index"):
        return f"{os.path.basename(path)}.index is missing"
    different = differs_from_manifest(path)
    if different:
        return different
    try:
        reader = tf.train.load_checkpoint(path)
        shapes = reader.get_variable_to_shape_map()
    except UNREADABLE as error:
        return f"its index cannot be read: {first_line(error)}"
    if of_a_run and "global_step" not in shapes:
        return "it has no global_step: it is no checkpoint of a training run"
    # Seconds for the largest models; silent where nobody watches.
    for name in tqdm(
        sorted(shapes), desc="checking the checkpoint", unit="variable", leave=False, disable=None
    ):
        try:
            reader.get_tensor(name)
        except UNREADABLE as error:
            return f"{name} cannot be read: {first_line(error)}"
    return None
