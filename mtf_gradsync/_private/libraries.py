"""Imports the libraries ``tf`` and ``mtf``, and makes ``mesh_tensorflow`` importable.

Mesh-TensorFlow 0.1.21 was written for the TensorFlow of 2022. Later versions of TensorFlow moved or
dropped names that Mesh-TensorFlow needs while it is imported:

- ``ops.register_tensor_conversion_function`` is in another module from TensorFlow 2.13 on;
- ``tf.estimator`` (also read by ``gin.tf``), ``tensorflow.python.tpu.tpu_config`` and
  ``.tpu_estimator`` are gone from TensorFlow 2.16 on.

Importing this module adds missing names, and nothing else. Specs and configs of Estimator are plain
data, and the stand-ins for them work as the originals do. In place of the session hooks of
``tf.estimator``, those of ``tf.train`` are used. Names that really need Estimator can be imported,
subclassed and used in annotations; calling such a name raises an error that says what to use.

Once this module is imported, ``mesh_tensorflow.transformer`` can be imported, too. For that, the
packages of the extra ``train`` of mtf_gradsync must be installed. Importing this module does not
parse flags of absl.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import tensorflow as _tf2
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import ops as _ops

__all__ = [
    "ESTIMATOR_AVAILABLE",
    "TF_VALUES",
    "mtf",
    "tf",
]

#: Tensors and variables of TensorFlow. Resource variables are no `tf.compat.v1.Variable`s.
TF_VALUES: tuple[Any, ...] = (tf.Tensor, _tf2.Variable)

_TPU_PACKAGE = "tensorflow.python.tpu"

# Modules of the same API that are separate objects (read on TensorFlow 2.12 and 2.21).
_V1_MODULES = (
    "tensorflow.compat.v1",
    "tensorflow._api.v2.compat.v1",
    "tensorflow._api.v2.v2.compat.v1",
)


def is_stand_in(module: Any) -> bool:
    """Returns whether a module is one that this package made for a module TensorFlow lacks."""
    # Reading an attribute of a LazyLoader would load its module, so only its type is read.
    return getattr(type(module), "is_mtf_gradsync_stand_in", False)


def _module_exists(name: str) -> bool:
    """Returns whether TensorFlow has the module; does not import it."""
    if name in sys.modules:
        return not is_stand_in(sys.modules[name])
    return importlib.util.find_spec(name) is not None


def _restore_tensor_conversion(ops_module: Any) -> None:
    """Adds ``register_tensor_conversion_function`` to the module where Mesh-TensorFlow needs it.

    TensorFlow 2.13 moved ``register_tensor_conversion_function`` to another module.
    """
    # Read on 2.12 (in framework.ops) and on 2.13 to 2.21 (in tensor_conversion_registry).
    if hasattr(ops_module, "register_tensor_conversion_function"):
        return
    from tensorflow.python.framework import tensor_conversion_registry

    ops_module.register_tensor_conversion_function = (
        tensor_conversion_registry.register_tensor_conversion_function
    )


#: Whether this TensorFlow still has Estimator and TPUEstimator (2.15 and older).
ESTIMATOR_AVAILABLE: bool = (
    hasattr(tf, "estimator")
    and not is_stand_in(tf.estimator)
    and _module_exists(f"{_TPU_PACKAGE}.tpu_estimator")
)

_restore_tensor_conversion(_ops)
_homes = [_tf2, tf, *(sys.modules[n] for n in _V1_MODULES if n in sys.modules)]
_tpu_modules = ("tpu_config", "tpu_estimator")
if not (
    all(hasattr(home, "estimator") for home in _homes)
    and all(_module_exists(f"{_TPU_PACKAGE}.{name}") for name in _tpu_modules)
):
    from mtf_gradsync._private import estimator_stand_ins as _stand_ins

    _stand_ins.restore_estimator(_homes)
    for name in _tpu_modules:
        if not _module_exists(f"{_TPU_PACKAGE}.{name}"):
            _stand_ins.restore_tpu_module(name)

import mesh_tensorflow as mtf  # noqa: E402 - only importable once the pieces above are back
