"""Builds a program in float64: what it would compute without rounding."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator
from unittest import mock

from mtf_gradsync._private.libraries import mtf, tf

_WITH_SCALARS = (mtf.ops.ScalarMultiplyOperation, mtf.ops.ScalarAddOperation)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Inside, mesh tensors and variables of floating point that are made are float64."""
    make_tensor, make_dtypes = mtf.Tensor.__init__, mtf.VariableDType.__init__
    make_import = mtf.ops.ImportOperation.__init__

    def wide(dtype: tf.DType) -> tf.DType:
        return tf.float64 if dtype.is_floating else dtype

    def tensor(self: Any, operation: Any, shape: Any, dtype: Any, *args: Any, **kw: Any) -> None:
        make_tensor(self, operation, shape, wide(dtype), *args, **kw)

    def dtypes(self: Any, master_dtype: Any = tf.float32, *others: Any, **named: Any) -> None:
        make_dtypes(self, wide(tf.as_dtype(master_dtype)))

    def imported(self: Any, mesh: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        tensor = tf.convert_to_tensor(tensor)
        make_import(self, mesh, tf.cast(tensor, wide(tensor.dtype)), *args, **kwargs)

    cast = mtf.ops.cast

    def cast_to_wide(x: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        return cast(x, wide(tf.as_dtype(dtype)), *args, **kwargs)

    def scaled(init: Any) -> Any:
        # A learning rate may be a tensor of TensorFlow's.
        def scalar_operation(self: Any, x: Any, scalar: Any, *args: Any, **kw: Any) -> None:
            if isinstance(scalar, tf.Tensor) and scalar.dtype.is_floating:
                scalar = tf.cast(scalar, x.dtype)
            init(self, x, scalar, *args, **kw)

        return scalar_operation

    with contextlib.ExitStack() as patched:
        for owner, function in (
            (mtf.Tensor, tensor),
            (mtf.VariableDType, dtypes),
            (mtf.ops.ImportOperation, imported),
            *((kind, scaled(kind.__init__)) for kind in _WITH_SCALARS),
        ):
            patched.enter_context(mock.patch.object(owner, "__init__", function))
        for module in (mtf, mtf.ops):
            patched.enter_context(mock.patch.object(module, "cast", cast_to_wide))
        yield
