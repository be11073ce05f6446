"""Changes a model while it is built, so that its update does not depend on the division.

The functions of this module remove three things from a model: random numbers, capacities of experts
(limits to how many examples an expert takes), and statistics over the batch. One more function
replaces the model's narrow floating-point dtypes by wider ones.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import Any, Callable, Iterator, Sequence
from unittest import mock

from mtf_gradsync.extension import mtf, tf

_MANY = 1e6  # times the examples that each expert would have


def _drop_dropout(undo_stack: contextlib.ExitStack, random_sizes: list[int]) -> None:
    signature = inspect.signature(mtf.ops.dropout)

    def dropout(x: mtf.Tensor, *args: Any, **kwargs: Any) -> mtf.Tensor:
        noise = signature.bind(x, *args, **kwargs).arguments.get("noise_shape")
        random_sizes.append((x.shape if noise is None else mtf.convert_to_shape(noise)).size)
        return x

    for module in (mtf, mtf.ops):
        undo_stack.enter_context(mock.patch.object(module, "dropout", dropout))


def _drop_random(undo_stack: contextlib.ExitStack, random_sizes: list[int]) -> None:
    init = mtf.ops.RandomOperation.__init__

    def constant(self: Any, mesh: Any, shape: Any, tf_fn: Any, **kwargs: Any) -> None:
        def half(shape: Any, dtype: tf.DType = tf.float32, **more: Any) -> tf.Tensor:
            low, high = more.get("minval", 0.0), more.get("maxval")
            middle = (low + (1.0 if high is None else high)) / 2
            return tf.cast(tf.fill(shape, middle), dtype)

        init(self, mesh, shape, half, **kwargs)

    undo_stack.enter_context(mock.patch.object(mtf.ops.RandomOperation, "__init__", constant))


def _drop_capacity(undo_stack: contextlib.ExitStack, random_sizes: list[int]) -> None:
    """Lets each of Mesh-TensorFlow's experts take all examples until `undo_stack` is closed.

    The argument `random_sizes` is not used. The function takes it because all functions in `_DROPS`
    take the same arguments.
    """
    moe = sys.modules.get("mesh_tensorflow.transformer.moe")
    for name in ("transformer_moe_layer_v1", "transformer_moe_layer_v2"):
        layer = getattr(moe, name, None)
        if layer is None:
            continue

        @functools.wraps(layer)
        def with_room(
            inputs: Any, output_dim: Any, hparams: Any, *args: Any, layer: Any = layer, **more: Any
        ) -> Any:
            for name in list(vars(hparams)):
                if name.startswith("moe_capacity_factor"):
                    setattr(hparams, name, _MANY)
            return layer(inputs, output_dim, hparams, *args, **more)

        undo_stack.enter_context(mock.patch.object(moe, name, with_room))


_DROPS: dict[str, Callable[[contextlib.ExitStack, list[int]], None]] = {
    "dropout": _drop_dropout,
    "random": _drop_random,
    "capacity": _drop_capacity,
}
DROPS = tuple(_DROPS)


def remove_parts(
    names: Sequence[str], undo_stack: contextlib.ExitStack, random_sizes: list[int]
) -> None:
    """Removes parts, such as dropout, from models that are built until `undo_stack` is closed.

    Args:
      names: the parts to remove: "dropout", "random" (all random numbers), "capacity" (limits to
        how many examples an expert takes).
      undo_stack: an exit stack; closing it undoes the removal.
      random_sizes: a list. For each removed dropout, the function appends how many random numbers
        the dropout would have drawn.
    """
    for name in names:
        _DROPS[name](undo_stack, random_sizes)


def make_constant(tensors: Sequence[mtf.Tensor]) -> None:
    """Makes tensors constant: they are lowered to ones, and have no gradients.

    Call `make_constant` before the mtf graph of `tensors` is lowered.
    """
    for x in tensors:
        operation: Any = x.operation

        def lower(lowering: mtf.Lowering, operation: Any = operation) -> None:
            mesh_impl = lowering.mesh_impl(operation)
            for out in operation.outputs:
                shape = mesh_impl.slice_shape(out.shape)
                ones = functools.partial(tf.ones, shape, out.dtype)
                lowering.set_tensor_lowering(out, mesh_impl.slicewise(ones))

        operation.lower = lower
        operation.gradient = lambda grads, operation=operation: [None] * len(operation.inputs)


_WITH_SCALARS = (mtf.ops.ScalarMultiplyOperation, mtf.ops.ScalarAddOperation)


_WITH_DTYPES = (mtf.ops.OneHotOperation, mtf.ops.RangeOperation)


@contextlib.contextmanager
def in_precision(least: tf.DType) -> Iterator[None]:
    """Widens floating-point dtypes of the model that is built inside the block to `least`.

    A dtype that is as wide as `least`, or wider, is not changed.
    """
    make_tensor, make_dtypes = mtf.Tensor.__init__, mtf.VariableDType.__init__
    make_import = mtf.ops.ImportOperation.__init__

    def wide(dtype: tf.DType) -> tf.DType:
        return least if dtype.is_floating and dtype.size < least.size else dtype

    def tensor(self: Any, operation: Any, shape: Any, dtype: Any, *args: Any, **kw: Any) -> None:
        make_tensor(self, operation, shape, wide(dtype), *args, **kw)

    def dtypes(
        self: Any, master_dtype: Any = tf.float32, slice_dtype: Any = None, *others: Any, **kw: Any
    ) -> None:
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

    def made(init: Any) -> Any:
        # Operations that keep the dtype of what they make.
        def operation(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            self._dtype = self.outputs[0].dtype

        return operation

    with contextlib.ExitStack() as patched:
        for owner, function in (
            (mtf.Tensor, tensor),
            (mtf.VariableDType, dtypes),
            (mtf.ops.ImportOperation, imported),
            *((kind, scaled(kind.__init__)) for kind in _WITH_SCALARS),
            *((kind, made(kind.__init__)) for kind in _WITH_DTYPES),
        ):
            patched.enter_context(mock.patch.object(owner, "__init__", function))
        for module in (mtf, mtf.ops):
            patched.enter_context(mock.patch.object(module, "cast", cast_to_wide))
        yield
