"""The one file that knows TensorFlow versions; it makes ``mesh_tensorflow`` importable."""

from __future__ import annotations

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import ops as _ops

if not hasattr(_ops, "register_tensor_conversion_function"):
    from tensorflow.python.framework import tensor_conversion_registry

    _ops.register_tensor_conversion_function = (
        tensor_conversion_registry.register_tensor_conversion_function
    )

import mesh_tensorflow as mtf  # noqa: E402

__all__ = ["mtf", "tf"]
