"""Writes checkpoints, in the format and under the names of Mesh-TensorFlow's own."""

from __future__ import annotations

import os
from typing import Any, Sequence

import numpy as np

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.optimizers.state.resharding import STATE_COLLECTION
from mtf_gradsync.optimizers.state.restoring import ReshardingSaver
from mtf_gradsync.train.checkpoints.leftovers import remove_leftovers
from mtf_gradsync.train.checkpoints.manifest import (
    checkpoint_files,
    forget_checkpoint,
    note_checkpoint,
)
from mtf_gradsync.train.errors import TrainingError, first_line


class Checkpointer:
    """Saves the state of a lowered graph: the masters, brought up to date from the slices.

    Attributes:
      prefix: path of a checkpoint without its step.
      saver: writes them, counts them and deletes old ones.
    """

    def __init__(
        self,
        model_dir: str,
        lowering: Any,
        keep_checkpoint_max: int | None,
        kept: Sequence[str] = (),
        sums_may_be_bad: bool = False,
    ):
        """Adds the saving operations to the default graph.

        Args:
          model_dir: directory of the checkpoints.
          lowering: an mtf.Lowering whose variables are all made.
          keep_checkpoint_max: older ones are deleted; None keeps all.
          kept: those that are there, from the oldest on; they count.
          sums_may_be_bad: whether an optimizer leaves out sums that are not finite, so that a
            checkpoint may hold some.
        """
        self.prefix = os.path.join(model_dir, "model.ckpt")
        self._slices_to_masters = lowering.copy_slices_to_masters()
        self.saver = _Saver(
            tf.global_variables(),
            sums_may_be_bad,
            # The Saver's own word for "all" is 0.
            max_to_keep=keep_checkpoint_max or 0,
            save_relative_paths=True,
        )
        self.saver.recover_last_checkpoints(list(kept))

    def save(self, session: tf.Session, step: int) -> str:
        """Writes a checkpoint and returns its path."""
        session.run(self._slices_to_masters)
        # The graph is built from the config; as a file it would be many times the variables.
        return self.saver.save(session, self.prefix, global_step=step, write_meta_graph=False)


class _Saver(ReshardingSaver):
    """Writes nothing that a run could not go on from."""

    def __init__(self, variables: Sequence[Any], sums_may_be_bad: bool, **kwargs: Any):
        super().__init__(variables, **kwargs)
        names = {v.op.name for v in tf.trainable_variables()}
        if not sums_may_be_bad:
            # What an accumulator holds is in the next update.
            names.update(note.name for note in tf.get_collection(STATE_COLLECTION))
        checked = [v for v in variables if v.op.name in names and v.dtype.is_floating]
        self._checked = [v.op.name for v in checked]
        with tf.name_scope("finite"):
            flags = [tf.reduce_all(tf.math.is_finite(v)) for v in checked]
            self._finite = tf.stack(flags).name if flags else None

    def save(self, sess: Any, save_path: str, *args: Any, **kwargs: Any) -> str:
        """See `tf.train.Saver.save`.

        Raises:
          TrainingError: if a trained variable or a sum of gradients holds what is no finite number,
            or the checkpoint cannot be written. The one before is as it was.
        """
        if self._finite:
            # By name: a SIMD program's session runs a graph of its own.
            finite = np.asarray(sess.run(self._finite))
            if not finite.all():
                bad = [name for name, ok in zip(self._checked, finite) if not ok]
                more = f" and {len(bad) - 2} more" if len(bad) > 2 else ""
                raise TrainingError(
                    f"{', '.join(bad[:2])}{more} hold numbers that are not finite, after step "
                    f"{kwargs.get('global_step')}; no checkpoint was written of it"
                )
        step = kwargs.get("global_step")
        try:
            forget_checkpoint(save_path if step is None else f"{save_path}-{step}")
            path = super().save(sess, save_path, *args, **kwargs)
            _put_on_disk(path)
        except (tf.errors.OpError, OSError, ValueError) as error:
            directory = os.path.dirname(save_path)
            # They take room where there may be none.
            remove_leftovers(directory)
            raise TrainingError(
                f"the checkpoint of step {step} cannot be written to {directory}: "
                f"{first_line(error)}"
            ) from error
        note_checkpoint(path)
        return path


def _put_on_disk(path: str) -> None:
    """Waits until a checkpoint outlives the machine's power."""
    directory = os.path.dirname(path) or "."
    state = os.path.join(directory, "checkpoint")
    for file in (*map(os.fspath, checkpoint_files(path)), state, directory):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
