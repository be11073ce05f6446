"""The hooks of a training, among them those that write checkpoints and summaries."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import restored_lowering
from mtf_gradsync._private.tensorflow import add_saving_listeners
from mtf_gradsync.estimator.host import HostCallHook


def training_hooks(
    config: Any,
    given: Sequence[Any],
    spec: Any,
    scaffold: tf.train.Scaffold | None,
    is_program: bool,
    listeners: Sequence[Any] | None,
) -> list[Any]:
    """Returns hooks to train with besides the caller's: the spec's, and those that write.

    `listeners` are added to the hook that saves checkpoints; without such a hook they are a
    ValueError.
    """
    made: list[Any] = [tf.train.NanTensorHook(spec.loss)]
    every = getattr(config, "log_step_count_steps", None)
    if every:
        shown = {"loss": spec.loss, "step": tf.train.get_global_step()}
        made.append(tf.train.LoggingTensorHook(shown, every_n_iter=every))
    made += [*spec.training_hooks, *getattr(spec, "training_chief_hooks", ())]
    if getattr(spec, "host_call", None):
        made.append(HostCallHook(spec.host_call))
    made += _writers(config, [*given, *made], scaffold, spec.loss, is_program)
    _listen([*given, *made], listeners)
    return made


def _writers(
    config: Any, hooks: Sequence[Any], scaffold: Any, loss: tf.Tensor, is_program: bool
) -> list[Any]:
    """Returns hooks for the checkpoints and summaries that no other hook writes."""
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


def _listen(hooks: Sequence[Any], listeners: Sequence[Any] | None) -> None:
    """Adds listeners to the first hook that saves checkpoints."""
    if not listeners:
        return
    savers = [hook for hook in hooks if isinstance(hook, tf.train.CheckpointSaverHook)]
    if not savers:
        raise ValueError(
            f"saving_listeners {list(listeners)} need checkpoints: give config a model_dir and "
            "save_checkpoints_steps or save_checkpoints_secs, or the spec a CheckpointSaverHook."
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
