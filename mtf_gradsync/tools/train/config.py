"""The settings of a run, which gin binds on ``train.run``, and their checks."""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType
from typing import Any, Callable, Dict, Literal, Sequence, Tuple, Union

import gin

from mtf_gradsync.extension import LayoutLike, MeshShapeLike, is_whole_number
from mtf_gradsync.runtimes._common import ConfigError, install_extra
from mtf_gradsync.runtimes.sessions import RuntimeName


def transformer_utils() -> ModuleType:
    """Returns the module ``mesh_tensorflow.transformer.utils``.

    Raises ConfigError if it cannot be imported, because the extra "train" is not installed.
    """
    return _import("utils")


def transformer_models() -> ModuleType:
    """Returns the module ``mesh_tensorflow.transformer.transformer``.

    Raises ConfigError if it cannot be imported, because the extra "train" is not installed.
    """
    return _import("transformer")


def learning_rate_schedules() -> ModuleType:
    """Returns the module ``mesh_tensorflow.transformer.learning_rate_schedules``.

    Raises ConfigError if it cannot be imported, because the extra "train" is not installed.
    """
    return _import("learning_rate_schedules")


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"mesh_tensorflow.transformer.{name}")
    except ImportError as error:
        raise ConfigError(
            f"mesh_tensorflow.transformer cannot be imported ({error}). Training transformers "
            f"needs the train extra: {install_extra('train')}"
        ) from error


def check_positive(name: str, value: Any, optional: bool = False) -> None:
    """Raises ConfigError unless the binding `name` of ``train.run`` is a positive integer.

    `value` is the value that the binding gives. With `optional` it may also be None.
    """
    if (optional and value is None) or is_whole_number(value):
        return
    raise ConfigError(
        f"train.run.{name} must be a positive integer{' or None' if optional else ''}; "
        f"got {value!r}"
    )


_FLAGS = ("autostack", "evaluate_with_averages", "keep_best", "noise_scale", "reports")
# TensorFlow's seeds for operations are of 64 bits with a sign, numpy's of 32 bits.
_SEEDS = 2**31


def check_flags_and_seed(config: RunConfig) -> None:
    """Checks the settings of a config that are True or False, and its seed.

    Raises ConfigError for a setting that is neither True nor False, and for a seed that is no whole
    number or out of range.
    """
    for name in _FLAGS:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ConfigError(f"train.run.{name} must be True or False; got {value!r}")
    if not is_whole_number(config.seed, 0) or config.seed >= _SEEDS:
        raise ConfigError(
            f"train.run.seed must be a whole number from 0 to {_SEEDS - 1}; got {config.seed!r}"
        )


def check_callable(name: str, value: Any, example: str, optional: bool = False) -> None:
    """Raises ConfigError unless the binding `name` of ``train.run`` is a class or function.

    `value` is the value that the binding gives; with `optional` it may also be None. `example` is a
    valid value, which the error's message names.
    """
    if callable(value) or (optional and value is None):
        return
    raise ConfigError(
        f"train.run.{name} must be a class or function, written as a gin reference without "
        f"parentheses like {example}; got {value!r}"
    )


def check_vocabulary(vocabulary: Any) -> None:
    """Raises ConfigError unless `vocabulary` can be used as a vocabulary.

    A vocabulary has `vocab_size`, `encode` and `decode`. `vocabulary` may also be a pair of
    vocabularies: one for inputs and one for targets.
    """
    pair = vocabulary if vocabulary and isinstance(vocabulary, tuple) else (vocabulary,)
    for one in pair:
        missing = [name for name in ("vocab_size", "encode", "decode") if not hasattr(one, name)]
        if missing or isinstance(one, type) or len(pair) > 2:
            raise ConfigError(
                "train.run.vocabulary must be an object with vocab_size, encode and decode (or an "
                "(inputs, targets) pair), written like @ByteVocabulary() with parentheses; got "
                f"{vocabulary!r}"
            )


SequenceLength = Union[int, Dict[str, int]]
BatchSize = Union[int, Tuple[str, int]]
LearningRate = Union[None, float, Callable[..., Any]]


ModelType = Literal["lm", "aligned", "bitransformer"]
RuntimeSetting = Literal["fastest", RuntimeName]
VariableFilter = Union[None, str, Callable[[Any], bool]]


@gin.configurable("run", module="mtf_gradsync.train")
@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The settings of a run, not checked yet; gin fills in missing ones.

    A setting that is also a parameter of ``mesh_tensorflow.transformer.utils.run`` means the same
    as this parameter.

    Attributes:
      model_type: "lm", "aligned" or "bitransformer".
      vocabulary: an object with vocab_size, encode and decode, or an (inputs, targets) pair.
      train_dataset_fn: function of sequence_length, vocabulary and dataset_split ("train") that
        returns a tf.data.Dataset of examples. When the Dataset ends, it is repeated. A function
        that also takes `start` returns the examples from that number on, without end.
      eval_dataset_fn: a function like `train_dataset_fn`, called with dataset_split "validation",
        or a function that returns a list of mesh_tensorflow EvalDatasets, of which the first is
        used; None evaluates nothing.
      autostack: whether Mesh-TensorFlow joins variables of equal shape, for a faster start.
      save_checkpoints_steps: save and evaluate a checkpoint every this many steps.
      keep_checkpoint_max: how many of the newest checkpoints to keep; None keeps all.
      batch_size: global batch size in sequences, or a (method, value) pair.
      outer_batch_size: size of an "outer_batch" dimension, for mixtures of experts.
      train_steps: how many steps the whole run makes.
      total_run_steps: the length of the run that learning rate schedules get; None for train_steps.
      sequence_length: an integer, or a dict from feature to integer.
      mesh_shape: for example "batch:4;model:2".
      mesh_devices: one device for each processor; None for as many virtual CPU devices.
      mesh_impl: a function that makes the placement mesh, such as
        `mtf_gradsync.placement_mesh_impl`; None for Mesh-TensorFlow's class PlacementMeshImpl.
      layout_rules: for example "batch:batch,d_ff:model,heads:model,vocab:model".
      learning_rate_schedule: a number, a function of step and total_train_steps, a list of both to
        be multiplied, or None for the optimizer's own learning rate.
      schedule_step: what schedules get as the step. @get_update_step gives them the number of
        updates: steps that only accumulate, or are skipped, do not count. Lengths in schedules are
        then numbers of updates, too. None gives them the global step, which counts all steps.
      optimizer: a class or function called with learning_rate=.
      variable_filter: which variables train: a regular expression or a function of an mtf variable;
        None for all.
      keep_best: whether the checkpoint with the lowest held-out loss is kept besides the newest
        ones, in the folder "best" of the run's directory.
      max_steps_without_decrease: end the run when the held-out loss has not fallen below its lowest
        value for this many steps, as Estimator's `stop_if_no_decrease_hook` does. None never ends
        the run for this reason.
      perplexity_eval_steps: evaluate on at most this many batches.
      evaluate_with_averages: whether held-out data are scored, and samples are written, with the
        moving averages that the optimizer keeps (`mtf_gradsync.AverageOptimizer`) in place of the
        variables. Training never takes the averages.
      init_checkpoint: begin with the values of this checkpoint for variables and slots that have
        the same name, shape and type in it; counts, sums and averages of wrappers begin anew.
      log_steps: measurements are written every this many steps. Losses, learning rates and tokens
        per second are means over the steps since the measurements before.
      reports: whether to measure what the optimizers report, such as norms of gradients.
      noise_scale: whether to estimate the gradient noise scale, in sequences, and to show it and
        the norms of the shards' gradients beside the loss.
      hooks: functions without arguments that each return a tf.train.SessionRunHook.
      seed: seed of the initial values, and of data sets that are shuffled without a seed.
      runtime: what runs the steps: "xla", "cpu_replicas", "placement_mesh", or "fastest" for the
        fastest that is installed.
      watch_copies_steps: compare the copies of variables and slots on all cores every this many
        steps and before each checkpoint, and end the run if they differ; None compares nothing.
      timeline_steps: record this many steps, and show in the report where their time went. The
        recording begins a few steps after the run's first. 0 records none.
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
    schedule_step: Callable[[Any], Any] | None = None
    optimizer: Callable[..., Any] = gin.REQUIRED
    variable_filter: VariableFilter = None
    keep_best: bool = False
    max_steps_without_decrease: int | None = None
    perplexity_eval_steps: int = 100
    evaluate_with_averages: bool = False
    init_checkpoint: str | None = None
    log_steps: int = 10
    reports: bool = True
    noise_scale: bool = False
    hooks: Sequence[Any] = ()
    seed: int = 0
    runtime: RuntimeSetting = "fastest"
    watch_copies_steps: int | None = None
    timeline_steps: int = 0

    def on_mesh(self, mesh_shape: MeshShapeLike, layout: LayoutLike, **more: Any) -> RunConfig:
        """Returns the settings on another mesh, of virtual CPU devices, with `more` changed."""
        mesh: dict[str, Any] = {"mesh_shape": mesh_shape, "layout_rules": layout}
        return dataclasses.replace(self, **mesh, mesh_devices=None, mesh_impl=None, **more)


def check_schedule(config: RunConfig) -> None:
    """Raises ConfigError for a wrong setting of when a run saves, logs, evaluates or ends.

    The settings of the timeline and the hooks are checked, too. `resolve_job` checks the other
    settings of a run.
    """
    for name in ("save_checkpoints_steps", "perplexity_eval_steps", "log_steps"):
        check_positive(name, getattr(config, name))
    for name in ("keep_checkpoint_max", "max_steps_without_decrease", "watch_copies_steps"):
        check_positive(name, getattr(config, name), optional=True)
    for name in ("keep_best", "max_steps_without_decrease"):
        if getattr(config, name) and config.eval_dataset_fn is None:
            raise ConfigError(
                f"train.run.{name} = {getattr(config, name)!r} needs a held-out loss: bind "
                "train.run.eval_dataset_fn"
            )
    steps = config.timeline_steps
    if not is_whole_number(steps, 0):
        raise ConfigError(f"train.run.timeline_steps must be a whole number from 0; got {steps!r}")
    check_callable("eval_dataset_fn", config.eval_dataset_fn, "@python_topics", optional=True)
    for hook in config.hooks if isinstance(config.hooks, (list, tuple)) else [config.hooks]:
        check_callable("hooks", hook, "[@MyHook]")
