"""Hooks that write checkpoints and summaries of a run."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import restored_lowering
from mtf_gradsync._private.tensorflow import add_saving_listeners


def writers(
    config: Any, hooks: Sequence[Any], scaffold: Any, loss: tf.Tensor, is_program: bool
) -> list[Any]:
    """Hooks that write what no other hook writes: checkpoints and summaries.

    Args:
      config: the run's; has a model_dir.
      hooks: the others.
      scaffold: the spec's, or None.
      loss: of a step.
      is_program: whether the step is a SIMD program.

    Returns:
      The hooks.
    """
    made: list[Any] = []
    steps = getattr(config, "save_checkpoints_steps", None)
    seconds = None if steps else getattr(config, "save_checkpoints_secs", None)
    has_saver = any(isinstance(hook, tf.train.CheckpointSaverHook) for hook in hooks)
    if not has_saver and (steps or seconds):
        restores = [hook for hook in hooks if isinstance(hook, mtf.MtfRestoreHook)]
        made.append(
            tf.train.CheckpointSaverHook(
                config.model_dir,
                save_secs=seconds,
                save_steps=steps,
                saver=(scaffold and scaffold.saver) or tf.get_collection(tf.GraphKeys.SAVERS)[0],
                listeners=[
                    mtf.MtfCheckpointSaverListener(restored_lowering(hook)) for hook in restores
                ],
            )
        )
    every = getattr(config, "log_step_count_steps", None)
    if every:
        made.append(tf.train.StepCounterHook(every, output_dir=config.model_dir))
    every = getattr(config, "save_summary_steps", None)
    # A program's summaries are part of it; host_call has those that leave it.
    if every and not is_program:
        if all(x.op.name != "loss" for x in tf.get_collection(tf.GraphKeys.SUMMARIES)):
            tf.summary.scalar("loss", loss)
        made.append(
            tf.train.SummarySaverHook(
                every, output_dir=config.model_dir, summary_op=tf.summary.merge_all()
            )
        )
    return made


def listen(hooks: Sequence[Any], listeners: Sequence[Any] | None) -> None:
    """Adds listeners to the first hook that saves checkpoints."""
    if not listeners:
        return
    savers = [hook for hook in hooks if isinstance(hook, tf.train.CheckpointSaverHook)]
    if not savers:
        raise ValueError(
            "saving_listeners need checkpoints: give config a model_dir and save_checkpoints_steps "
            "or save_checkpoints_secs, or the spec a CheckpointSaverHook."
        )
    add_saving_listeners(savers[0], listeners)


def write_summary(directory: str, scalars: dict[str, Any], step: int) -> None:
    """Writes scalars for TensorBoard."""
    values = [
        tf.Summary.Value(tag=name, simple_value=float(value))
        for name, value in sorted(scalars.items())
        if name != "global_step" and np.ndim(value) == 0
    ]
    # The writer that hooks have too: another one of the same second would have the same file.
    writer = tf.summary.FileWriterCache.get(directory)
    writer.add_summary(tf.Summary(value=values), step)
    writer.flush()
