"""RunConfig: the parameters that gin binds on ``train.run``."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Literal, Sequence, Union

import gin

from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike
from mtf_gradsync.train.config.settings import BatchSize, LearningRate, SequenceLength

ModelType = Literal["lm", "aligned", "bitransformer"]
RuntimeName = Literal["fastest", "xla", "cpu_replicas", "placement_mesh"]
VariableFilter = Union[None, str, Callable[[Any], bool]]


@gin.configurable("run", module="mtf_gradsync.train")
@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The settings of a run, not checked yet; gin fills in those that are not given.

    Parameters that ``mesh_tensorflow.transformer.utils.run`` has too mean the same here.

    Attributes:
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
      variable_filter: which variables train: a regular expression or a function of an mtf
        variable; None for all.
      perplexity_eval_steps: evaluate on at most this many batches.
      evaluate_with_averages: whether held-out data are scored, and samples are written, with the
        moving averages that the optimizer keeps (`mtf_gradsync.AverageOptimizer`) in place of the
        variables. Training goes on with the variables.
      init_checkpoint: begin with the variables of this checkpoint where names and shapes agree.
      log_steps: measurements are written every this many steps.
      reports: whether to measure what the optimizers report, norms of gradients above all.
      noise_scale: whether to estimate the gradient noise scale, in sequences, and to show it and
        the norms of the shards' gradients beside the loss.
      hooks: functions without arguments that each return a tf.train.SessionRunHook.
      seed: seed of the initial values.
      runtime: what runs the steps: "xla", "cpu_replicas", "placement_mesh", or "fastest" for the
        fastest that is installed.
      timeline_steps: record this many steps, a few after the run's first, and show where their time
        went in the report; 0 records none.
    """

    model_type: ModelType = "lm"
    vocabulary: Any = gin.REQUIRED
    train_dataset_fn: Callable[..., Any] = gin.REQUIRED
    eval_dataset_fn: Callable[..., Any] | None = None
    autostack: bool = True
    save_checkpoints_steps: int = 5000
    keep_checkpoint_max: int | None = None
    batch_size: BatchSize = ("tokens_per_replica", 2048)
    outer_batch_size: int | None = None
    train_steps: int = gin.REQUIRED
    total_run_steps: int | None = None
    sequence_length: SequenceLength = gin.REQUIRED
    mesh_shape: MeshShapeLike = gin.REQUIRED
    mesh_devices: Sequence[str] | None = None
    mesh_impl: Callable[..., Any] | None = None
    layout_rules: LayoutLike = gin.REQUIRED
    learning_rate_schedule: LearningRate | list[Any] = None
    optimizer: Callable[..., Any] = gin.REQUIRED
    variable_filter: VariableFilter = None
    perplexity_eval_steps: int = 100
    evaluate_with_averages: bool = False
    init_checkpoint: str | None = None
    log_steps: int = 10
    reports: bool = True
    noise_scale: bool = False
    hooks: Sequence[Any] = ()
    seed: int = 0
    runtime: RuntimeName = "fastest"
    timeline_steps: int = 0
