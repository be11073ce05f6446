"""The main job: train a transformer that gin describes, then say what it has learned."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence

import gin

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.session import session_config
from mtf_gradsync.train import checkpoint
from mtf_gradsync.train.config import settings
from mtf_gradsync.train.data import datasets as data
from mtf_gradsync.train.errors import ConfigError
from mtf_gradsync.train.evaluation.evaluate import Score
from mtf_gradsync.train.evaluation.held_out import METRICS_FILE, HeldOut
from mtf_gradsync.train.evaluation.plot import check_matplotlib
from mtf_gradsync.train.job import TrainingJob, resolve_job
from mtf_gradsync.train.loop import LoopResult, LoopSettings, train_loop
from mtf_gradsync.train.model import TrainGraph, VariableFilter
from mtf_gradsync.train.progress import MetricsFile

CONFIG_FILE = "operative_config.gin"


class RunResult(NamedTuple):
    """What a run came to.

    Attributes:
      step: training steps made.
      stopped_by: the signal that stopped it early, or None.
      held_out: score on the held-out data; None without any, or when stopped.
      unigram: the baseline's score on the same data.
    """

    step: int
    stopped_by: int | None
    held_out: Score | None
    unigram: Score | None


@gin.configurable(module="mtf_gradsync.train")
def run(
    model_dir: str,
    model_type: str = "lm",
    vocabulary: Any = gin.REQUIRED,
    train_dataset_fn: Callable[..., Any] = gin.REQUIRED,
    eval_dataset_fn: Callable[..., Any] | None = None,
    autostack: bool = True,
    save_checkpoints_steps: int = 5000,
    keep_checkpoint_max: int | None = None,
    batch_size: int | tuple[str, int] = ("tokens_per_replica", 2048),
    outer_batch_size: int | None = None,
    train_steps: int = gin.REQUIRED,
    total_run_steps: int | None = None,
    sequence_length: settings.SequenceLength = gin.REQUIRED,
    mesh_shape: Any = gin.REQUIRED,
    mesh_devices: Sequence[str] | None = None,
    mesh_impl: Callable[..., Any] | None = None,
    layout_rules: Any = gin.REQUIRED,
    learning_rate_schedule: settings.LearningRate | list[Any] = None,
    optimizer: Callable[..., Any] = gin.REQUIRED,
    variable_filter: VariableFilter = None,
    perplexity_eval_steps: int = 100,
    init_checkpoint: str | None = None,
    log_steps: int = 10,
    hooks: Sequence[Any] = (),
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> RunResult:
    """Trains a mesh_tensorflow.transformer model and evaluates it.

    Parameters that ``mesh_tensorflow.transformer.utils.run`` has too mean the same here. A run
    goes on from the newest checkpoint in model_dir; a finished one is only evaluated. Which data
    a step sees follows from the step, so a run that was stopped takes the same steps as one that
    was not.

    Args:
      model_dir: directory of everything that the run writes.
      model_type: "lm", "aligned" or "bitransformer".
      vocabulary: an object with vocab_size, encode and decode, or an (inputs, targets) pair.
      train_dataset_fn: function of sequence_length, vocabulary and dataset_split ("train") that
        returns a tf.data.Dataset of examples. It is repeated when it ends.
      eval_dataset_fn: the same with dataset_split "validation", or a function that returns a list
        of mesh_tensorflow EvalDatasets, of which the first is used; None evaluates nothing.
      autostack: whether Mesh-TensorFlow stacks variables of equal shape (a faster start).
      save_checkpoints_steps: a checkpoint, and an evaluation, every this many steps.
      keep_checkpoint_max: delete older checkpoints; None keeps all.
      batch_size: global batch size in sequences, or a (method, value) pair.
      outer_batch_size: size of an "outer_batch" dimension, for mixtures of experts.
      train_steps: how many steps in all.
      total_run_steps: length of the run as the schedule sees it; None for train_steps.
      sequence_length: an integer, or a dict from feature to integer.
      mesh_shape: for example "batch:4;model:2".
      mesh_devices: one device for each processor; None for as many virtual CPU devices.
      mesh_impl: makes the placement mesh, such as `mtf_gradsync.placement_mesh_impl`; None for
        Mesh-TensorFlow's.
      layout_rules: for example "batch:batch,d_ff:model,heads:model,vocab:model".
      learning_rate_schedule: a number, a function of step and total_train_steps, a list of both
        to be multiplied, or None for the optimizer's own.
      optimizer: a class or function called with learning_rate=.
      variable_filter: which variables train: a regular expression or a function; None for all.
      perplexity_eval_steps: evaluate on at most this many batches.
      init_checkpoint: begin with the variables of this checkpoint where names and shapes agree.
      log_steps: a line in the metrics file every this many steps.
      hooks: functions without arguments that each return a tf.train.SessionRunHook.
      seed: of the initial values.
      say: takes each line that tells how the run goes.

    Returns:
      What the run came to.

    Raises:
      ConfigError: if a setting cannot work.
      TrainingError: if the loss is no longer finite.
    """
    settings.check_count("save_checkpoints_steps", save_checkpoints_steps)
    settings.check_count("keep_checkpoint_max", keep_checkpoint_max, optional=True)
    settings.check_count("perplexity_eval_steps", perplexity_eval_steps)
    settings.check_count("log_steps", log_steps)
    settings.check_callable("eval_dataset_fn", eval_dataset_fn, "@python_topics", optional=True)
    for hook in hooks if isinstance(hooks, (list, tuple)) else [hooks]:
        settings.check_callable("hooks", hook, "[@MyHook]")
    check_matplotlib()
    job = resolve_job(
        model_type=model_type,
        vocabulary=vocabulary,
        train_dataset_fn=train_dataset_fn,
        autostack=autostack,
        batch_size=batch_size,
        outer_batch_size=outer_batch_size,
        train_steps=train_steps,
        total_run_steps=total_run_steps,
        sequence_length=sequence_length,
        mesh_shape=mesh_shape,
        mesh_devices=mesh_devices,
        mesh_impl=mesh_impl,
        layout_rules=layout_rules,
        learning_rate_schedule=learning_rate_schedule,
        optimizer=optimizer,
        variable_filter=variable_filter,
        seed=seed,
    )
    model, mesh = job.model, job.model.mesh
    loop = LoopSettings(
        model_dir=model_dir,
        train_steps=train_steps,
        save_checkpoints_steps=save_checkpoints_steps,
        keep_checkpoint_max=keep_checkpoint_max,
        log_steps=log_steps,
        tokens_per_step=model.batch_size * model.sequence_length["targets"],
    )
    directory = _make_directory(model_dir)
    config = session_config(num_cpu_devices=mesh.num_cpu_devices)
    path = checkpoint.latest_checkpoint(model_dir)
    step = checkpoint.checkpoint_step(path) if path else 0

    evaluation = HeldOut(model, directory, config, say)
    if eval_dataset_fn is not None:
        evaluation.prepare(train_dataset_fn, eval_dataset_fn, perplexity_eval_steps)
    with evaluation:
        if step >= train_steps:
            say(f"{model_dir} has all {train_steps} steps already (train.run.train_steps)")
            result = LoopResult(step, None, 0.0, 0)
        else:
            metrics = MetricsFile(directory / METRICS_FILE, step)
            began = time.monotonic()
            with tf.Graph().as_default():
                graph = _training_graph(job)
                if init_checkpoint and not path:
                    count = checkpoint.initialize_from(init_checkpoint)
                    say(f"{count} variables begin as in {init_checkpoint}")
                say(
                    f"training {graph.num_parameters:,} parameters on the mesh {_names(mesh)}, "
                    f"from step {step} to {train_steps} (graph built in "
                    f"{time.monotonic() - began:.0f} s)"
                )
                checkpoint.write_atomically(directory / CONFIG_FILE, gin.operative_config_str())
                result = train_loop(
                    graph,
                    loop,
                    config,
                    metrics,
                    lambda saved, at, progress: evaluation.point(saved, at, metrics, progress),
                    hooks=[hook() for hook in hooks],
                )
        if result.stopped_by is not None:
            evaluation.plot()
            say(
                f"stopped after step {result.step} of {train_steps}, with a checkpoint; the same "
                "command goes on from there"
            )
            return RunResult(result.step, result.stopped_by, None, None)
        speed = {}
        if result.steps_made:
            rate = result.steps_made * loop.tokens_per_step / result.seconds
            speed = {"seconds": round(result.seconds, 1), "tokens_per_second": round(rate, 1)}
            say(f"{result.steps_made} steps in {result.seconds:.0f} s, {rate:,.0f} tokens/s")
        held_out = evaluation.finish(
            checkpoint.latest_checkpoint(model_dir), step=result.step, **speed
        )
    return RunResult(result.step, None, held_out, evaluation.unigram)


def _training_graph(job: TrainingJob) -> TrainGraph:
    global_step = tf.train.get_or_create_global_step()
    features = data.training_batches(
        job.dataset(),
        job.model.batch_size,
        first_batch=tf.cast(global_step.read_value(), tf.int64),
    )
    return job.build(features)


def _make_directory(model_dir: str) -> Path:
    directory = Path(model_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--model_dir={model_dir} cannot be made: {error}") from error
    return directory


def _names(mesh: settings.MeshSettings) -> str:
    return ";".join(f"{dim.name}:{dim.size}" for dim in mesh.shape.dims)
