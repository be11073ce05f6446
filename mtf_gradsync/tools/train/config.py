"""The settings of a run: what gin binds on ``train.run``, checked and resolved."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
import math
import re
from types import ModuleType
from typing import Any, Callable, Collection, Dict, Literal, NamedTuple, Sequence, Tuple, Union

import gin
import numpy as np

from mtf_gradsync.extension import (
    ConfigError,
    LayoutLike,
    MeshShapeLike,
    close_to,
    first_line,
    install_extra,
    is_number,
    is_whole_number,
    mesh_text,
    mtf,
    tf,
)


def transformer_utils() -> ModuleType:
    """Imports ``mesh_tensorflow.transformer.utils``; raises a ConfigError without the extra."""
    return _import("utils")


def transformer_models() -> ModuleType:
    """Imports ``mesh_tensorflow.transformer.transformer``."""
    return _import("transformer")


def learning_rate_schedules() -> ModuleType:
    """Imports ``mesh_tensorflow.transformer.learning_rate_schedules``."""
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
    """Raises ConfigError unless a binding of ``train.run`` is a positive integer."""
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
    """Raises ConfigError unless the switches of a config are booleans and its seed a seed."""
    for name in _FLAGS:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ConfigError(f"train.run.{name} must be True or False; got {value!r}")
    if not is_whole_number(config.seed, 0) or config.seed >= _SEEDS:
        raise ConfigError(
            f"train.run.seed must be a whole number from 0 to {_SEEDS - 1}; got {config.seed!r}"
        )


def check_callable(name: str, value: Any, example: str, optional: bool = False) -> None:
    """Raises ConfigError unless a binding of ``train.run`` is a class or function."""
    if callable(value) or (optional and value is None):
        return
    raise ConfigError(
        f"train.run.{name} must be a class or function, written as a gin reference without "
        f"parentheses like {example}; got {value!r}"
    )


def check_vocabulary(vocabulary: Any) -> None:
    """Raises ConfigError unless a vocabulary, or an (inputs, targets) pair of them, can be used."""
    pair = vocabulary if vocabulary and isinstance(vocabulary, tuple) else (vocabulary,)
    for one in pair:
        missing = [name for name in ("vocab_size", "encode", "decode") if not hasattr(one, name)]
        if missing or isinstance(one, type) or len(pair) > 2:
            raise ConfigError(
                "train.run.vocabulary must be an object with vocab_size, encode and decode (or an "
                "(inputs, targets) pair), written like @ByteVocabulary() with parentheses; got "
                f"{vocabulary!r}"
            )


_logger = logging.getLogger(__name__)


class MeshSettings(NamedTuple):
    """A mesh, a device for each of its processors, and how many CPU devices the session needs.

    `mesh_impl` makes a placement mesh of shape, layout and devices; `rules` are the layout's pairs
    of a tensor dimension and a mesh dimension, none where they are not known.
    """

    shape: mtf.Shape
    layout: mtf.LayoutRules
    devices: list[str]
    num_cpu_devices: int
    mesh_impl: Callable[..., Any] = mtf.placement_mesh_impl.PlacementMeshImpl
    rules: Sequence[tuple[str, str]] = ()

    def placement_mesh(self, devices: Sequence[str] | None = None) -> Any:
        """Makes the placement mesh, on its own devices or on others."""
        return self.mesh_impl(self.shape, self.layout, list(devices or self.devices))

    def on_one_process(self) -> MeshSettings:
        """Returns the same mesh on the devices of each process, without a cluster's tasks."""
        devices = [
            tf.DeviceSpec.from_string(device).replace(job=None, replica=None, task=None).to_string()
            for device in self.devices
        ]
        return self._replace(devices=devices)

    def check_devices(self) -> None:
        """Raises ConfigError for a GPU of this process that TensorFlow does not see."""
        specs = map(tf.DeviceSpec.from_string, self.devices)
        wanted = [spec for spec in specs if spec.device_type == "GPU" and spec.job is None]
        there = len(tf.config.list_physical_devices("GPU")) if wanted else 0
        for spec in wanted:
            if (spec.device_index or 0) >= there:
                raise ConfigError(
                    f"train.run.mesh_devices names {spec.to_string()}, and TensorFlow "
                    f"{tf.__version__} sees {there or 'no'} GPU{'s' if there != 1 else ''} here. "
                    "Name devices that are there; without the binding the run is on virtual CPU "
                    "devices, or on the devices that jax has."
                )

    def split(self, dimension: str) -> int:
        """Returns into how many parts the mesh splits tensor dimensions of a name."""
        return mtf.tensor_dim_to_mesh_dim_size(self.layout, self.shape, mtf.Dimension(dimension, 0))

    def check_splits(self, graph: mtf.Graph, inputs: Collection[str]) -> None:
        """Checks the layout against the dimensions of a model's tensors.

        `inputs` are the names of the dimensions of its inputs.

        Raises ConfigError for a dimension that the mesh cannot split evenly, and where the rules
        for a mesh dimension split no variable and no input over it: each of its processors would
        compute the same, but for attention, which takes any rule's name to split its own tensors.
        Other rules that split no variable and no input are logged.
        """
        dims = sorted({dim for op in graph.operations for x in op.outputs for dim in x.shape.dims})
        variables = {dim.name for v in graph.all_variables for dim in v.shape.dims}
        given = sorted(variables.union(inputs))
        sizes = {axis.name: axis.size for axis in self.shape.dims}
        axes = {name: axis for name, axis in self.rules if axis in sizes}
        uneven = [dim for dim in dims if dim.size % self.split(dim.name)]
        if uneven:
            over = {axes.get(dim.name, "?"): self.split(dim.name) for dim in uneven}
            hint = "Change one of the two"
            if "vocab" in (dim.name for dim in uneven):
                hint += (
                    f"; Unitransformer.vocab_divisor = {self.split('vocab')} pads the vocabulary"
                )
            raise ConfigError(
                f'train.run.mesh_shape = "{mesh_text(self.shape)}" splits by '
                f"{' and '.join(f'{axis}:{size}' for axis, size in over.items())}, which does not "
                f"divide {', '.join(f'{dim.name} = {dim.size}' for dim in uneven)} of the model "
                f"(train.run.layout_rules). {hint}."
            )
        for name, axis in self.rules:
            if name in given or axis not in sizes:
                continue
            close = close_to(name, given, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            if sizes[axis] > 1 and not any(axes.get(one) == axis for one in given):
                raise ConfigError(
                    f"train.run.layout_rules: no variable and no input of this model has the "
                    f'dimension "{name}"{hint}, and no other rule splits one over the '
                    f'{sizes[axis]} parts of the mesh dimension "{axis}": they would all compute '
                    f"the same. There are {', '.join(given)}."
                )
            _logger.info(
                "The layout rule %s:%s splits no variable and no input: none has this dimension%s",
                name, axis, hint,
            )  # fmt: skip


def resolve_mesh(
    mesh_shape: MeshShapeLike,
    layout_rules: LayoutLike,
    mesh_devices: Sequence[str] | None,
    mesh_impl: Callable[..., Any] | None = None,
) -> MeshSettings:
    """Checks the mesh, the layout and the devices of a `RunConfig` against each other."""
    shape = _convert(mtf.convert_to_shape, "mesh_shape", mesh_shape, "batch:4;model:2")
    layout = _convert(
        mtf.convert_to_layout_rules, "layout_rules", layout_rules, "batch:batch;heads:model"
    )
    rules = _layout_pairs(layout_rules)
    _check_rules(rules, shape)
    if mesh_devices is None:
        mesh_devices = [f"/device:CPU:{i}" for i in range(shape.size)]
    if isinstance(mesh_devices, str) or len(mesh_devices) != shape.size:
        given = repr(mesh_devices) if isinstance(mesh_devices, str) else f"{len(mesh_devices)}"
        raise ConfigError(
            f"train.run.mesh_devices must list {shape.size} devices, one for each processor of "
            f'the mesh "{mesh_text(shape)}"; got {given}. Give None to run on '
            f"{shape.size} virtual CPU devices."
        )
    check_callable("mesh_impl", mesh_impl, "@placement_mesh_impl", optional=True)
    return MeshSettings(
        shape,
        layout,
        list(mesh_devices),
        _num_cpu_devices(mesh_devices),
        mesh_impl or mtf.placement_mesh_impl.PlacementMeshImpl,
        rules,
    )


def axes_of(mesh_shape: MeshShapeLike) -> list[str]:
    """Returns the names of a mesh's axes."""
    shape = _convert(mtf.convert_to_shape, "mesh_shape", mesh_shape, "batch:4;model:2")
    return [dim.name for dim in shape.dims]


def _convert(convert: Callable[[Any], Any], name: str, value: Any, example: str) -> Any:
    try:
        converted = convert(value)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'train.run.{name} = {value!r} cannot be read; write it like "{example}" ({error})'
        ) from error
    if converted is None:
        raise ConfigError(f'train.run.{name} must be given, for example "{example}"')
    return converted


def _check_rules(rules: Sequence[tuple[str, str]], mesh_shape: Any) -> None:
    """Raises an error for a rule with a misspelt mesh dimension; allows rules for other meshes.

    T5's layouts have rules for other meshes ("ensemble:ensemble"), which Mesh-TensorFlow ignores;
    so one counts as misspelt only if the mesh has a dimension without any rule.
    """
    names = [dim.name for dim in mesh_shape.dims]
    absent = [(tensor_dim, mesh_dim) for tensor_dim, mesh_dim in rules if mesh_dim not in names]
    used = {mesh_dim for _, mesh_dim in rules}
    idle = [dim.name for dim in mesh_shape.dims if dim.size > 1 and dim.name not in used]
    if absent and idle:
        tensor_dim, mesh_dim = absent[0]
        raise ConfigError(
            f'train.run.layout_rules maps "{tensor_dim}" to the mesh dimension "{mesh_dim}", '
            f"which the mesh does not have: train.run.mesh_shape has {names}, and no rule uses "
            f'{idle}. Take the rule "{tensor_dim}:{mesh_dim}" out, or name one of those.'
        )
    for tensor_dim, mesh_dim in absent:
        _logger.info(
            "The layout rule %s:%s has no effect: the mesh has no such dimension.",
            tensor_dim,
            mesh_dim,
        )


def _layout_pairs(layout_rules: Any) -> list[tuple[str, str]]:
    """Returns the rules as given; none for an mtf.LayoutRules, which has no public list of them."""
    if isinstance(layout_rules, mtf.LayoutRules):
        return []
    if isinstance(layout_rules, str):
        rules = [rule for rule in re.split("[,;]", layout_rules) if rule]
        return [tuple(rule.split(":")) for rule in rules]
    return list(layout_rules)


def _num_cpu_devices(mesh_devices: Sequence[str]) -> int:
    """Returns one more than the largest CPU number that a device string names."""
    highest = 0
    for device in mesh_devices:
        try:
            spec = tf.DeviceSpec.from_string(device)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"train.run.mesh_devices names {device!r}, which is not a device; write it like "
                f'"cpu:0", "gpu:0" or "/job:worker/task:1/device:CPU:0" ({error})'
            ) from error
        if spec.device_type in (None, "CPU"):
            highest = max(highest, spec.device_index or 0)
    return highest + 1


SequenceLength = Union[int, Dict[str, int]]
BatchSize = Union[int, Tuple[str, int]]
LearningRate = Union[None, float, Callable[..., Any]]


def resolve_sequence_length(sequence_length: SequenceLength) -> dict[str, int]:
    """Returns the length of every feature, by its name."""
    if is_whole_number(sequence_length):
        return {"inputs": sequence_length, "targets": sequence_length}
    if (
        isinstance(sequence_length, dict)
        and "targets" in sequence_length
        and all(map(is_whole_number, sequence_length.values()))
    ):
        return dict(sequence_length)
    raise ConfigError(
        "train.run.sequence_length must be a positive integer or a dict such as "
        f'{{"inputs": 64, "targets": 64}}; got {sequence_length!r}'
    )


def resolve_batch_size(
    batch_size: BatchSize,
    sequence_length: dict[str, int],
    mesh: MeshSettings,
    outer_batch_size: int,
) -> int:
    """Returns the number of sequences in a global batch, which the mesh can split evenly.

    A pair is that of ``mesh_tensorflow.transformer.utils.compute_batch_size``; an outer_batch_size
    of 0 is none.
    """
    given = batch_size
    if is_whole_number(given):
        size = given
    else:
        try:
            size = transformer_utils().compute_batch_size(
                sequence_length, mesh.shape, mesh.layout, batch_size
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(
                "train.run.batch_size must be a positive integer or a pair such as "
                f'("tokens_per_replica", 2048); got {given!r} ({error})'
            ) from error
    parts = mesh.split("batch")
    inner = size // max(1, outer_batch_size)
    if inner * max(1, outer_batch_size) != size or inner < 1 or inner % parts:
        outer = f" in {outer_batch_size} outer batches" if outer_batch_size else ""
        raise ConfigError(
            f"train.run.batch_size = {given!r} gives batches of {size} sequences{outer}, "
            f"which the mesh cannot split evenly: train.run.layout_rules and "
            f'train.run.mesh_shape split "batch" into {parts} parts. Use a multiple of '
            f"{parts * max(1, outer_batch_size)}."
        )
    return size


def resolve_learning_rate(
    learning_rate_schedule: LearningRate | list[Any], total_steps: int
) -> LearningRate:
    """Returns None, a number, or a function of the keyword argument ``step``.

    Schedules of `RunConfig` see total_steps as the length of the run.
    """
    factors = learning_rate_schedule
    for one in factors if isinstance(factors, (list, tuple)) else [factors]:
        if is_number(one) and not 0 <= one < math.inf:
            raise ConfigError(
                "Numbers in train.run.learning_rate_schedule must be finite and not negative; got "
                f"{learning_rate_schedule!r}"
            )
        elif callable(one):
            _check_schedule(one, by_name=one is factors)
    if factors == [] or factors == ():
        raise ConfigError(
            f"train.run.learning_rate_schedule needs factors to multiply, or None for the "
            f"optimizer's own learning rate; got {factors!r}"
        )
    if isinstance(factors, (list, tuple)) and all(callable(f) or is_number(f) for f in factors):
        return functools.partial(
            learning_rate_schedules().product_learning_rate,
            total_train_steps=total_steps,
            factors=list(factors),
        )
    if callable(factors):
        return functools.partial(factors, total_train_steps=total_steps)
    if factors is None or is_number(factors):
        return factors
    raise ConfigError(
        "train.run.learning_rate_schedule must be a number, a function such as "
        "@learning_rate_schedules.learning_rate_schedule_noam, a list of both to multiply, or "
        f"None; got {learning_rate_schedule!r}"
    )


def rate_of_step(learning_rate: LearningRate, step: tf.Tensor) -> Any:
    """Returns the learning rate of a step: None, a number, or the scalar that a schedule gives."""
    if not callable(learning_rate):
        return learning_rate
    try:
        rate = learning_rate(step=step)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"train.run.learning_rate_schedule cannot be called: {first_line(error)}"
        ) from error
    if isinstance(rate, mtf.Tensor):
        dims = rate.shape.to_integer_list
    else:
        shape = tf.TensorShape(rate.shape if hasattr(rate, "shape") else np.shape(rate))
        dims = shape.as_list() if shape.rank else []
    if dims:
        raise ConfigError(
            f"train.run.learning_rate_schedule gives {rate!r}, of the shape {dims}; it must "
            "give one number, a scalar"
        )
    return rate


def _check_schedule(function: Callable[..., Any], by_name: bool) -> None:
    """Raises ConfigError for a function that cannot be called with what a schedule gets."""
    try:
        signature = inspect.signature(function)
        if by_name:
            signature.bind_partial(step=0, total_train_steps=1)
        else:
            signature.bind_partial(0, 1)
    except TypeError as error:
        raise ConfigError(
            "train.run.learning_rate_schedule: a schedule takes the arguments step and "
            f"total_train_steps; {getattr(function, '__name__', 'it')}{signature}: {error}"
        ) from error
    except ValueError:  # a function of C does not say what it takes
        return


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
        returns a tf.data.Dataset of examples, repeated when it ends. One that takes `start`, too,
        returns the examples from that number on, without end.
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
      schedule_step: the step that schedules get: @get_update_step for the number of updates, so
        that steps that only accumulate, or are skipped, do not count; the lengths that schedules
        have are then updates, too. None for the global step, which counts all steps.
      optimizer: a class or function called with learning_rate=.
      variable_filter: which variables train: a regular expression or a function of an mtf
        variable; None for all.
      keep_best: whether the checkpoint of the lowest held-out loss is kept as well, in "best" of
        the run's directory.
      max_steps_without_decrease: end the run when the held-out loss has not fallen below its lowest
        for this many steps, as Estimator's `stop_if_no_decrease_hook` does; None never does.
      perplexity_eval_steps: evaluate on at most this many batches.
      evaluate_with_averages: whether held-out data are scored, and samples are written, with the
        moving averages that the optimizer keeps (`mtf_gradsync.AverageOptimizer`) in place of the
        variables. Training goes on with the variables.
      init_checkpoint: begin with the variables and slots of this checkpoint where names, shapes and
        types agree; wrappers' counts, sums and averages begin anew.
      log_steps: measurements are written every this many steps; losses, learning rates and tokens
        per second are means over the steps since the last time.
      reports: whether to measure what the optimizers report, norms of gradients above all.
      noise_scale: whether to estimate the gradient noise scale, in sequences, and to show it and
        the norms of the shards' gradients beside the loss.
      hooks: functions without arguments that each return a tf.train.SessionRunHook.
      seed: seed of the initial values, and of data sets that are shuffled without one.
      runtime: what runs the steps: "xla", "cpu_replicas", "placement_mesh", or "fastest" for the
        fastest that is installed.
      watch_copies_steps: compare the copies of variables and slots on all cores every this many
        steps and before each checkpoint, and end the run if they differ; None compares nothing.
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
    runtime: RuntimeName = "fastest"
    watch_copies_steps: int | None = None
    timeline_steps: int = 0


def check_schedule(config: RunConfig) -> None:
    """Raises a ConfigError if a setting that `resolve_job` does not check cannot work."""
    for name in ("save_checkpoints_steps", "perplexity_eval_steps", "log_steps"):
        check_positive(name, getattr(config, name))
    for name in ("keep_checkpoint_max", "max_steps_without_decrease", "watch_copies_steps"):
        check_positive(name, getattr(config, name), optional=True)
    for name in ("keep_best", "max_steps_without_decrease"):
        if getattr(config, name) and config.eval_dataset_fn is None:
            raise ConfigError(
                f"train.run.{name} = {getattr(config, name)!r} goes by the held-out loss: bind "
                "train.run.eval_dataset_fn"
            )
    steps = config.timeline_steps
    if not is_whole_number(steps, 0):
        raise ConfigError(f"train.run.timeline_steps must be a whole number from 0; got {steps!r}")
    check_callable("eval_dataset_fn", config.eval_dataset_fn, "@python_topics", optional=True)
    for hook in config.hooks if isinstance(config.hooks, (list, tuple)) else [config.hooks]:
        check_callable("hooks", hook, "[@MyHook]")
