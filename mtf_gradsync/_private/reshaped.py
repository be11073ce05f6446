"""Variables of TensorFlow's, seen in other shapes."""

from __future__ import annotations

from typing import Any

from mtf_gradsync._private.libraries import tf


class Reshaped:
    """A variable, seen in another shape. TensorFlow takes it as a tensor and in assignments."""

    def __init__(self, variable: Any, shape: list[int]):
        self._variable = variable
        self.shape, self.dtype = tf.TensorShape(shape), variable.dtype.base_dtype
        # What stands for the slices of a SIMD mesh has no device of its own.
        self.device = getattr(variable, "device", "")

    def value(self) -> tf.Tensor:
        """Reads it."""
        return tf.reshape(self._variable, self.shape)

    def assign(self, value: tf.Tensor, name: str | None = None) -> Any:
        """As `tf.assign` asks for it."""
        return tf.assign(self._variable, self._as_held(value), name=name)

    def assign_add(self, value: tf.Tensor, name: str | None = None) -> Any:
        """As `tf.assign_add` asks for it."""
        return tf.assign_add(self._variable, self._as_held(value), name=name)

    def assign_sub(self, value: tf.Tensor, name: str | None = None) -> Any:
        """As `tf.assign_sub` asks for it."""
        return tf.assign_sub(self._variable, self._as_held(value), name=name)

    def _as_held(self, value: tf.Tensor) -> tf.Tensor:
        return tf.reshape(value, self._variable.shape)


def _as_tensor(x: Reshaped, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
    del name, as_ref
    return x.value() if dtype in (None, x.dtype) else NotImplemented


tf.register_tensor_conversion_function(Reshaped, _as_tensor)
