"""Checkpoints of a run, in the format and under the names of Mesh-TensorFlow's own."""

from __future__ import annotations

import os
from typing import Any

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.optimizers.state.restoring import ReshardingSaver, changes
from mtf_gradsync.train.errors import ConfigError

# More differences than these are counted, not listed.
_MAX_LISTED = 4


def latest_checkpoint(model_dir: str) -> str | None:
    """Returns the newest checkpoint of a directory, or None."""
    return tf.train.latest_checkpoint(model_dir)


def checkpoint_step(path: str) -> int:
    """Returns the number of training steps behind a checkpoint.

    Raises:
      ConfigError: if the file is not a checkpoint of a training run.
    """
    try:
        return int(tf.train.load_variable(path, "global_step"))
    except (tf.errors.OpError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{path} cannot be read as a checkpoint of a training run: {_first_line(error)}"
        ) from error


def check_fits(path: str, variables: list[Any], model_dir: str) -> None:
    """Checks that every variable can be restored, before anything is.

    Args:
      path: the checkpoint.
      variables: tf variables that are to be restored.
      model_dir: named in the error.

    Raises:
      ConfigError: if some are missing in the checkpoint or have another shape there.
    """
    try:
        saved = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    except (tf.errors.OpError, ValueError) as error:
        raise ConfigError(f"checkpoint {path} cannot be read: {_first_line(error)}") from error
    problems = []
    adapted = {name for name, change in changes(path).items() if change.fits}
    for variable in variables:
        name, shape = variable.op.name, variable.shape.as_list()
        if name in adapted:
            continue
        if name not in saved:
            problems.append(f"{name} is not in the checkpoint")
        elif saved[name] != shape:
            problems.append(f"{name} has the shape {saved[name]} there and {shape} here")
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:_MAX_LISTED])
        more = len(problems) - _MAX_LISTED
        listed += f"\n  and {more} more" if more > 0 else ""
        raise ConfigError(
            f"the checkpoint {path} was made by another model or optimizer than this config "
            f"describes:\n{listed}\nNothing was changed. Use the config that made it, or another "
            f"--model_dir than {model_dir}."
        )


class Checkpointer:
    """Saves the state of a lowered graph: the masters, brought up to date from the slices.

    Attributes:
      prefix: path of a checkpoint without its step.
      saver: writes them, counts them and deletes old ones.
    """

    def __init__(self, model_dir: str, lowering: Any, keep_checkpoint_max: int | None):
        """Adds the saving operations to the default graph.

        Args:
          model_dir: directory of the checkpoints.
          lowering: an mtf.Lowering whose variables are all made.
          keep_checkpoint_max: older ones are deleted; None keeps all.
        """
        self.prefix = os.path.join(model_dir, "model.ckpt")
        self._slices_to_masters = lowering.copy_slices_to_masters()
        self.saver = ReshardingSaver(
            tf.global_variables(),
            # The Saver's own word for "all" is 0.
            max_to_keep=keep_checkpoint_max or 0,
            save_relative_paths=True,
        )

    def save(self, session: tf.Session, step: int) -> str:
        """Writes a checkpoint and returns its path."""
        session.run(self._slices_to_masters)
        # The graph is built from the config; as a file it would be many times the variables.
        return self.saver.save(session, self.prefix, global_step=step, write_meta_graph=False)


def initialize_from(init_checkpoint: str) -> int:
    """Makes the initial values of the default graph those of another run's checkpoint.

    The step starts at 0. Variables that the other model did not have keep their own
    initial values.

    Args:
      init_checkpoint: a checkpoint path, or a directory whose newest one is used.

    Returns:
      How many variables are taken from it.

    Raises:
      ConfigError: if there is no such checkpoint, or none of its variables is in the graph.
    """
    try:
        saved = dict(tf.train.list_variables(init_checkpoint))
    except (tf.errors.OpError, ValueError, TypeError) as error:
        raise ConfigError(
            f"train.run.init_checkpoint = {init_checkpoint!r} is not a checkpoint: "
            f"{_first_line(error)}"
        ) from error
    chosen = {
        v.op.name: v
        for v in tf.global_variables()
        if v.op.name != "global_step" and saved.get(v.op.name) == v.shape.as_list()
    }
    if not chosen:
        raise ConfigError(
            f"train.run.init_checkpoint = {init_checkpoint!r} has no variable of this model; it "
            f"has for example {sorted(saved)[:3]}"
        )
    tf.train.init_from_checkpoint(init_checkpoint, chosen)
    return len(chosen)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
