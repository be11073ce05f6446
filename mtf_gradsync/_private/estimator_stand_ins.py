"""Stand-ins for Estimator's specs and configs, as plain data, for TensorFlow without Estimator.

With these stand-ins, `mtf_gradsync.estimator.Estimator` runs a model_fn that was written for
Estimator or TPUEstimator. The stand-ins have the fields and defaults of TensorFlow 2.15.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from types import MappingProxyType
from typing import Any, Mapping, NamedTuple, NoReturn, Sequence

import tensorflow as tf2
import tensorflow.compat.v1 as tf
from tensorflow.python import tpu as tpu_package

_LAST_WITH_ESTIMATOR = "2.15"


class ModeKeys:
    """The names of Estimator's modes, with which model functions compare their argument `mode`."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


class _EstimatorFields(NamedTuple):
    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metric_ops: Any = None
    export_outputs: Any = None
    training_chief_hooks: Sequence[Any] = ()
    training_hooks: Sequence[Any] = ()
    scaffold: Any = None
    evaluation_hooks: Sequence[Any] = ()
    prediction_hooks: Sequence[Any] = ()


class _TPUFields(NamedTuple):
    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metrics: Any = None
    export_outputs: Any = None
    scaffold_fn: Any = None
    host_call: Any = None
    training_hooks: Sequence[Any] = ()
    evaluation_hooks: Sequence[Any] = ()
    prediction_hooks: Sequence[Any] = ()


class _Spec:
    """A base class of specs; raises ValueError if a field that the spec's mode needs is missing."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        needed = {
            ModeKeys.TRAIN: ("loss", "train_op"),
            ModeKeys.EVAL: ("loss",),
            ModeKeys.PREDICT: ("predictions",),
        }
        spec: Any = super().__new__(cls, *args, **kwargs)
        kind = cls.__name__
        if spec.mode not in needed:
            raise ValueError(f"mode of {kind} must be one of {list(needed)}, got {spec.mode!r}.")
        missing = [name for name in needed[spec.mode] if getattr(spec, name) is None]
        if missing:
            raise ValueError(f"{kind} of mode {spec.mode!r} needs {' and '.join(missing)}.")
        return spec


class EstimatorSpec(_Spec, _EstimatorFields):
    """The return value of a model_fn."""

    __slots__ = ()


class TPUEstimatorSpec(_Spec, _TPUFields):
    """The return value of a model_fn for TPUEstimator."""

    __slots__ = ()


class _Settings:
    """A base class of configs: settings are attributes, with defaults for those not given."""

    _defaults: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, **settings: Any):
        for name, value in {**self._defaults, **settings}.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({given})"


class RunConfig(_Settings):
    """The settings of a program that uses Estimator."""

    _defaults = MappingProxyType(
        {
            "model_dir": None,
            "tf_random_seed": None,
            "save_summary_steps": 100,
            "save_checkpoints_steps": None,
            "save_checkpoints_secs": 600,
            "session_config": None,
            "keep_checkpoint_max": 5,
            "keep_checkpoint_every_n_hours": 10000,
            "log_step_count_steps": 100,
        }
    )

    def __init__(self, model_dir: str | None = None, **settings: Any):
        if settings.get("save_checkpoints_steps") is not None:
            settings.setdefault("save_checkpoints_secs", None)
        super().__init__(model_dir=model_dir, **settings)


class TPUConfig(_Settings):
    """The settings of a program on a TPU."""

    _defaults = MappingProxyType(
        {
            "iterations_per_loop": 2,
            "num_shards": None,
            "num_cores_per_replica": None,
            "per_host_input_for_training": True,
        }
    )

    def __init__(self, iterations_per_loop: int = 2, **settings: Any):
        super().__init__(iterations_per_loop=iterations_per_loop, **settings)


class TPURunConfig(RunConfig):
    """The settings of a program that uses TPUEstimator."""

    def __init__(
        self,
        tpu_config: Any = None,
        evaluation_master: Any = None,
        master: Any = None,
        cluster: Any = None,
        **settings: Any,
    ):
        super().__init__(
            tpu_config=tpu_config or TPUConfig(),
            evaluation_master=evaluation_master,
            master=master,
            cluster=cluster,
            **settings,
        )


class WarmStartSettings(NamedTuple):
    """A checkpoint that variables are initialized from, and the names of these variables."""

    ckpt_to_initialize_from: str
    vars_to_warm_start: Any = ".*"
    var_name_to_vocab_info: Any = None
    var_name_to_prev_var_name: Any = None


class PredictOutput(NamedTuple):
    """The predictions of an exported model."""

    outputs: Any


class ServingInputReceiver(NamedTuple):
    """The inputs of an exported model: features for the model_fn, and tensors to feed."""

    features: Any
    receiver_tensors: Any


# Names that programs subclass, use in annotations, or call. Others raise AttributeError.
_ESTIMATOR_CLASSES = (
    "BestExporter",
    "Estimator",
    "EvalSpec",
    "Exporter",
    "FinalExporter",
    "Head",
    "LatestExporter",
    "TrainSpec",
    "train_and_evaluate",
)


class EstimatorRemovedError(RuntimeError):
    """The error of a program that uses Estimator, if TensorFlow does not have it any more."""


def _removed_message(what: str) -> str:
    return (
        f"{what} is not available: this is TensorFlow {tf2.__version__}, and Estimator left "
        f"TensorFlow after {_LAST_WITH_ESTIMATOR}. Put mtf_gradsync.estimator.Estimator in its "
        "place, which runs the same model_fn, or install tensorflow<2.16."
    )


def _removed_class(name: str, module: str) -> type:
    """Returns a class that can be subclassed; constructing it raises `EstimatorRemovedError`.

    `name` is the name of the class, and `module` the module that it was in, for the error.
    """

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        del cls, args, kwargs
        raise EstimatorRemovedError(_removed_message(f"{module}.{name}"))

    doc = f"Stand-in for {module}.{name}; constructing it raises EstimatorRemovedError."
    return type(name, (), {"__new__": refuse, "__module__": module, "__doc__": doc})


class _InputPipelineConfig:
    """The input modes of `TPUConfig`, with the values that they have in TensorFlow 2.15."""

    PER_SHARD_V1 = 1
    PER_HOST_V1 = 2
    PER_HOST_V2 = 3
    BROADCAST = 4
    SLICED = 5


_TPU_CONFIG = {
    "InputPipelineConfig": _InputPipelineConfig,
    "RunConfig": TPURunConfig,
    "TPUConfig": TPUConfig,
}
_TPU = {"TPUEstimatorSpec": TPUEstimatorSpec, **_TPU_CONFIG}


class _StandInModule(types.ModuleType):
    """A stand-in module; the error for a missing attribute says why TensorFlow lacks it."""

    is_mtf_gradsync_stand_in = True

    def __getattr__(self, name: str) -> Any:
        # The import system, inspect and copy read dunder names, not users.
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise AttributeError(_removed_message(f"{self.__name__}.{name}"))


def _stand_in_module(name: str, members: dict[str, Any]) -> types.ModuleType:
    module = _StandInModule(name, "Stand-in for a module that this TensorFlow does not have.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    for key, value in members.items():
        setattr(module, key, value)
    return module


def _estimator_stand_in() -> types.ModuleType:
    """Returns a ``tf.estimator`` with the session hooks of ``tf.train`` and stand-in classes."""
    name = "tensorflow.compat.v1.estimator"
    members: dict[str, Any] = {"ModeKeys": ModeKeys}
    # In TensorFlow 2.15 these names of tf.estimator are the very objects of tf.train.
    of_hooks = ("CheckpointSaverListener", "NanLossDuringTrainingError", "SecondOrStepTimer")
    for shared in dir(tf.train):
        is_hook = shared.endswith("Hook") or shared.startswith("SessionRun") or shared in of_hooks
        if is_hook or shared == "VocabInfo":
            members[shared] = getattr(tf.train, shared)
    members.update({cls: _removed_class(cls, name) for cls in _ESTIMATOR_CLASSES})
    export = {
        "PredictOutput": PredictOutput,
        "ServingInputReceiver": ServingInputReceiver,
    }
    tpu = {"TPUEstimator": _removed_class("TPUEstimator", f"{name}.tpu"), **_TPU}
    members.update(
        EstimatorSpec=EstimatorSpec,
        RunConfig=RunConfig,
        WarmStartSettings=WarmStartSettings,
        export=_stand_in_module(f"{name}.export", export),
        tpu=_stand_in_module(f"{name}.tpu", tpu),
    )
    return _stand_in_module(name, members)


def restore_estimator(modules: list[Any]) -> None:
    """Sets the attribute ``estimator`` of modules that lack it to one stand-in module.

    `modules` are the modules of TensorFlow that had the attribute ``estimator`` in earlier
    versions.
    """
    made = [module.estimator for module in modules if hasattr(module, "estimator")]
    stand_in: Any = next((one for one in made if isinstance(one, _StandInModule)), None)
    for module in modules:
        if not hasattr(module, "estimator"):
            stand_in = module.estimator = stand_in or _estimator_stand_in()


def restore_tpu_module(name: str) -> None:
    """Makes a stand-in for the missing module ``tensorflow.python.tpu.<name>`` importable.

    `name` is ``tpu_config`` or ``tpu_estimator``. If the module is loaded already, nothing changes.
    """
    place = f"{tpu_package.__name__}.{name}"
    if place in sys.modules:
        return
    of_estimator = {
        "TPUEstimator": _removed_class("TPUEstimator", place),
        "TPUEstimatorSpec": TPUEstimatorSpec,
    }
    module = _stand_in_module(place, _TPU_CONFIG if name == "tpu_config" else of_estimator)
    sys.modules[place] = module
    setattr(tpu_package, name, module)
