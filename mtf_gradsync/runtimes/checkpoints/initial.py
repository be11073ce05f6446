"""Initial values from checkpoints: another run's, and values that a run's own checkpoint lacks."""

from __future__ import annotations

import os
import tempfile
from typing import Mapping

import numpy as np

from mtf_gradsync._names import some_of
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.optimizers.state.restoring import write_changed
from mtf_gradsync.runtimes.checkpoints.damage import damage_of
from mtf_gradsync.runtimes.errors import ConfigError, first_line

COMPLETED_PREFIX = ".completed-"


def initialize_from(init_checkpoint: str) -> int:
    """Replaces initial values in the default graph by a checkpoint's; returns how many.

    The step starts at 0. Variables that the other model did not have keep their own initial values.
    A directory stands for its newest checkpoint.
    """
    try:
        saved = dict(tf.train.list_variables(init_checkpoint))
    except (tf.errors.OpError, ValueError, TypeError) as error:
        raise ConfigError(
            f"train.run.init_checkpoint = {init_checkpoint!r} is not a checkpoint: "
            f"{first_line(error)}"
        ) from error
    path = init_checkpoint
    if os.path.isdir(path):
        path = tf.train.latest_checkpoint(path) or path
    damage = damage_of(path, of_a_run=False)
    if damage:
        raise ConfigError(f"train.run.init_checkpoint: {path} is damaged: {damage}")
    chosen = {
        v.op.name: v
        for v in tf.global_variables()
        if v.op.name != "global_step" and saved.get(v.op.name) == v.shape.as_list()
    }
    if not chosen:
        raise ConfigError(
            f"train.run.init_checkpoint = {init_checkpoint!r} has no variable of this model; it "
            f"has {some_of(sorted(saved))}"
        )
    tf.train.init_from_checkpoint(init_checkpoint, chosen)
    return len(chosen)


def completed(path: str, new: Mapping[str, np.ndarray]) -> str:
    """Writes a copy of a checkpoint with `new` variables, by name, and returns its path.

    It is in a new directory beside the other, so that every machine that sees one sees both. The
    caller removes the directory.
    """
    directory = tempfile.mkdtemp(prefix=COMPLETED_PREFIX, dir=os.path.dirname(path))
    target = os.path.join(directory, os.path.basename(path))
    write_changed(path, target, new)
    return target
