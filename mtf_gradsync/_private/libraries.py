"""The libraries underneath, ``tf`` and ``mtf``: makes ``mesh_tensorflow`` importable.

Mesh-TensorFlow 0.1.21 was written for the TensorFlow of 2022. Later TensorFlows moved or dropped
things that it names while it is being imported:

- ``ops.register_tensor_conversion_function``: moved to another module in 2.13;
- ``tf.estimator`` (also read by ``gin.tf``), ``tensorflow.python.tpu.tpu_config`` and
  ``.tpu_estimator``: gone from 2.16 on.

Importing this module adds what is missing, and nothing else. Specs and configs of Estimator are
data, and work; its session hooks are those of ``tf.train``. Names that really need Estimator can be
imported, subclassed and used in annotations; calling one raises `EstimatorRemovedError`.

``mesh_tensorflow.transformer`` needs the ``train`` extra, and can be imported afterwards. Flags of
absl are not parsed: a program without ``absl.app`` that makes a ``SimdMeshImpl``, which reads two,
calls ``absl.flags.FLAGS.mark_as_parsed()`` itself.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any, NoReturn

import tensorflow as _tf2
import tensorflow.compat.v1 as tf
from tensorflow.python import tpu as _tpu_package
from tensorflow.python.framework import ops as _ops

from mtf_gradsync._private import estimator_stand_ins as _data

__all__ = [
    "ESTIMATOR_AVAILABLE",
    "TF_VALUES",
    "EstimatorRemovedError",
    "mtf",
    "tf",
]

#: Tensors and variables of TensorFlow. Resource variables are no `tf.compat.v1.Variable`s.
TF_VALUES: tuple[Any, ...] = (tf.Tensor, _tf2.Variable)

_LAST_WITH_ESTIMATOR = "2.15"
_TPU_PACKAGE = "tensorflow.python.tpu"

# Modules of the same API that are separate objects (read on TensorFlow 2.12 and 2.21).
_V1_MODULES = (
    "tensorflow.compat.v1",
    "tensorflow._api.v2.compat.v1",
    "tensorflow._api.v2.v2.compat.v1",
)

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
    """A program used something that needs Estimator, which this TensorFlow no longer has."""


def _removed_message(what: str) -> str:
    return (
        f"{what} is not available: this is TensorFlow {_tf2.__version__}, and Estimator left "
        f"TensorFlow after {_LAST_WITH_ESTIMATOR}. Put mtf_gradsync.estimator.Estimator in its "
        "place, which runs the same model_fn, or install tensorflow<2.16."
    )


def _removed_class(name: str, module: str) -> type:
    """Returns a class that can be imported and subclassed; constructing it raises."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        del cls, args, kwargs
        raise EstimatorRemovedError(_removed_message(f"{module}.{name}"))

    doc = f"Stand-in for {module}.{name}; constructing it raises EstimatorRemovedError."
    return type(name, (), {"__new__": refuse, "__module__": module, "__doc__": doc})


class _InputPipelineConfig:
    """TPUConfig's input modes, with the values that TensorFlow 2.15 gives them."""

    PER_SHARD_V1 = 1
    PER_HOST_V1 = 2
    PER_HOST_V2 = 3
    BROADCAST = 4
    SLICED = 5


_TPU_CONFIG_DATA = {
    "InputPipelineConfig": _InputPipelineConfig,
    "RunConfig": _data.TPURunConfig,
    "TPUConfig": _data.TPUConfig,
}
_TPU_DATA = {"TPUEstimatorSpec": _data.TPUEstimatorSpec, **_TPU_CONFIG_DATA}


class _StandInModule(types.ModuleType):
    """A module that raises an error for unknown attributes, which says why they are missing."""

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


def _is_stand_in(module: Any) -> bool:
    # Reading an attribute of a LazyLoader would load its module, so only its type is read.
    return getattr(type(module), "is_mtf_gradsync_stand_in", False)


def _estimator_stand_in() -> types.ModuleType:
    """Returns a ``tf.estimator`` with the session hooks of ``tf.train`` and stand-in classes."""
    name = "tensorflow.compat.v1.estimator"
    members: dict[str, Any] = {"ModeKeys": _data.ModeKeys}
    # In TensorFlow 2.15 these names of tf.estimator are the very objects of tf.train.
    hooks = (
        "CheckpointSaverHook",
        "CheckpointSaverListener",
        "FeedFnHook",
        "FinalOpsHook",
        "GlobalStepWaiterHook",
        "LoggingTensorHook",
        "NanLossDuringTrainingError",
        "NanTensorHook",
        "ProfilerHook",
        "SecondOrStepTimer",
        "SessionRunArgs",
        "SessionRunContext",
        "SessionRunHook",
        "SessionRunValues",
        "StepCounterHook",
        "StopAtStepHook",
        "SummarySaverHook",
        "VocabInfo",
    )
    members.update({hook: getattr(tf.train, hook) for hook in hooks if hasattr(tf.train, hook)})
    members.update({cls: _removed_class(cls, name) for cls in _ESTIMATOR_CLASSES})
    export = {
        "PredictOutput": _data.PredictOutput,
        "ServingInputReceiver": _data.ServingInputReceiver,
    }
    tpu = {"TPUEstimator": _removed_class("TPUEstimator", f"{name}.tpu"), **_TPU_DATA}
    members.update(
        EstimatorSpec=_data.EstimatorSpec,
        RunConfig=_data.RunConfig,
        WarmStartSettings=_data.WarmStartSettings,
        export=_stand_in_module(f"{name}.export", export),
        tpu=_stand_in_module(f"{name}.tpu", tpu),
    )
    return _stand_in_module(name, members)


def _module_exists(name: str) -> bool:
    """Returns whether TensorFlow itself has the module; does not import it."""
    if name in sys.modules:
        return not _is_stand_in(sys.modules[name])
    return importlib.util.find_spec(name) is not None


def _restore_tensor_conversion(ops_module: Any) -> None:
    """Puts ``register_tensor_conversion_function`` back where Mesh-TensorFlow looks for it."""
    # Read on 2.12 (in framework.ops) and on 2.13 to 2.21 (in tensor_conversion_registry).
    if hasattr(ops_module, "register_tensor_conversion_function"):
        return
    from tensorflow.python.framework import tensor_conversion_registry

    ops_module.register_tensor_conversion_function = (
        tensor_conversion_registry.register_tensor_conversion_function
    )


def _restore_estimator(modules: list[Any]) -> None:
    """Gives all modules of the list that have no ``estimator`` the same stand-in."""
    lacking = [module for module in modules if not hasattr(module, "estimator")]
    if not lacking:
        return
    made = (m.estimator for m in modules if hasattr(m, "estimator"))
    stand_in = next(filter(_is_stand_in, made), None) or _estimator_stand_in()
    for module in lacking:
        module.estimator = stand_in


def _restore_tpu_module(name: str, members: dict[str, Any]) -> None:
    """Registers a stand-in for ``tensorflow.python.tpu.<name>`` unless the module exists."""
    full_name = f"{_TPU_PACKAGE}.{name}"
    if full_name in sys.modules or _module_exists(full_name):
        return
    module = _stand_in_module(full_name, members)
    sys.modules[full_name] = module
    setattr(_tpu_package, name, module)


#: Whether this TensorFlow still has Estimator and TPUEstimator (2.15 and older).
ESTIMATOR_AVAILABLE: bool = (
    hasattr(tf, "estimator")
    and not _is_stand_in(tf.estimator)
    and _module_exists(f"{_TPU_PACKAGE}.tpu_estimator")
)

_restore_tensor_conversion(_ops)
_restore_estimator([_tf2, tf, *(sys.modules[n] for n in _V1_MODULES if n in sys.modules)])
_restore_tpu_module("tpu_config", _TPU_CONFIG_DATA)
_restore_tpu_module(
    "tpu_estimator",
    {
        "TPUEstimator": _removed_class("TPUEstimator", f"{_TPU_PACKAGE}.tpu_estimator"),
        "TPUEstimatorSpec": _data.TPUEstimatorSpec,
    },
)

import mesh_tensorflow as mtf  # noqa: E402 - only importable once the pieces above are back
