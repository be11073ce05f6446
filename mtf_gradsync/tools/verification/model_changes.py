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


def replace_function(
    undo_stack: contextlib.ExitStack, owner: Any, name: str, call: Callable[..., Any]
) -> None:
    """Replaces a function of a module, or a method of a class, until `undo_stack` is closed.

    Args:
      undo_stack: an exit stack; closing it gives `owner` its own function back.
      owner: the module or class that has the function.
      name: the name of the function.
      call: what is called in place of the function: it gets the function, and then the arguments.
    """
    function = vars(owner)[name]

    @functools.wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return call(function, *args, **kwargs)

    replacement.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    undo_stack.enter_context(mock.patch.object(owner, name, replacement))


def expert_layers() -> list[tuple[Any, str]]:
    """Returns Mesh-TensorFlow's layers of experts as pairs (module, name); [] if not imported."""
    moe = sys.modules.get("mesh_tensorflow.transformer.moe")
    names = ("transformer_moe_layer_v1", "transformer_moe_layer_v2")
    return [(moe, name) for name in names if hasattr(moe, name)]


def _drop_dropout(undo_stack: contextlib.ExitStack, random_sizes: list[int]) -> None:
    def unchanged(dropout: Any, x: mtf.Tensor, *args: Any, **kwargs: Any) -> mtf.Tensor:
        given = inspect.signature(dropout).bind(x, *args, **kwargs).arguments
        noise = given.get("noise_shape")
        random_sizes.append((x.shape if noise is None else mtf.convert_to_shape(noise)).size)
        return x

    for module in (mtf, mtf.ops):
        replace_function(undo_stack, module, "dropout", unchanged)


def _drop_random(undo_stack: contextlib.ExitStack, random_sizes: list[int]) -> None:
    def constant(init: Any, op: Any, mesh: Any, shape: Any, tf_fn: Any, **kwargs: Any) -> None:
        def half(shape: Any, dtype: tf.DType = tf.float32, **more: Any) -> tf.Tensor:
            low, high = more.get("minval", 0.0), more.get("maxval")
            middle = (low + (1.0 if high is None else high)) / 2
            return tf.cast(tf.fill(shape, middle), dtype)

        init(op, mesh, shape, half, **kwargs)

    replace_function(undo_stack, mtf.ops.RandomOperation, "__init__", constant)


def _drop_capacity(undo_stack: contextlib.ExitStack, random_sizes: list[int]) -> None:
    """Lets each of Mesh-TensorFlow's experts take all examples until `undo_stack` is closed.

    The argument `random_sizes` is not used. The function takes it because all functions in `_DROPS`
    take the same arguments.
    """

    def with_room(
        layer: Any, inputs: Any, output_dim: Any, hparams: Any, *args: Any, **more: Any
    ) -> Any:
        for name in list(vars(hparams)):
            if name.startswith("moe_capacity_factor"):
                setattr(hparams, name, _MANY)
        return layer(inputs, output_dim, hparams, *args, **more)

    for module, name in expert_layers():
        replace_function(undo_stack, module, name, with_room)


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


@contextlib.contextmanager
def in_precision(least: tf.DType) -> Iterator[None]:
    """Widens floating-point dtypes of the model that is built inside the block to `least`.

    A dtype that is as wide as `least`, or wider, is not changed.
    """

    def wide(dtype: tf.DType) -> tf.DType:
        return least if dtype.is_floating and dtype.size < least.size else dtype

    def tensor(
        init: Any, x: Any, operation: Any, shape: Any, dtype: Any, *args: Any, **kwargs: Any
    ) -> None:
        init(x, operation, shape, wide(dtype), *args, **kwargs)

    def dtypes(
        init: Any, self: Any, master_dtype: Any = tf.float32, *others: Any, **kw: Any
    ) -> None:
        init(self, wide(tf.as_dtype(master_dtype)))

    def imported(init: Any, op: Any, mesh: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        tensor = tf.convert_to_tensor(tensor)
        init(op, mesh, tf.cast(tensor, wide(tensor.dtype)), *args, **kwargs)

    def cast_to_wide(cast: Any, x: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        return cast(x, wide(tf.as_dtype(dtype)), *args, **kwargs)

    def with_scalar(init: Any, op: Any, x: Any, scalar: Any, *args: Any, **kwargs: Any) -> None:
        # A learning rate may be a tensor of TensorFlow's.
        if isinstance(scalar, tf.Tensor) and scalar.dtype.is_floating:
            scalar = tf.cast(scalar, x.dtype)
        init(op, x, scalar, *args, **kwargs)

    def with_dtype(init: Any, op: Any, *args: Any, **kwargs: Any) -> None:
        # Operations that keep the dtype of what they make.
        init(op, *args, **kwargs)
        op._dtype = op.outputs[0].dtype

    with contextlib.ExitStack() as undo_stack:
        for owner, function in (
            (mtf.Tensor, tensor),
            (mtf.VariableDType, dtypes),
            (mtf.ops.ImportOperation, imported),
            (mtf.ops.ScalarMultiplyOperation, with_scalar),
            (mtf.ops.ScalarAddOperation, with_scalar),
            (mtf.ops.OneHotOperation, with_dtype),
            (mtf.ops.RangeOperation, with_dtype),
        ):
            replace_function(undo_stack, owner, "__init__", function)
        for module in (mtf, mtf.ops):
            replace_function(undo_stack, module, "cast", cast_to_wide)
        yield
