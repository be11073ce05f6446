"""Patches of optimizers and of Mesh-TensorFlow that record and change a program as it is built.

`recording` records a program, and changes its stack of wrappers and its model. Three things can be
removed from a model, so that its update does not depend on the division: random numbers, capacities
of experts (limits to how many examples an expert takes), and statistics over the batch.
`in_precision` replaces the model's narrow floating-point dtypes by wider ones.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import Any, Callable, Iterator, Sequence
from unittest import mock

import gin

from mtf_gradsync.extension import (
    NOT_GIVEN,
    CommonArguments,
    TrainOptimizerInterface,
    Wrapper,
    mtf,
    tf,
)
from mtf_gradsync.tools.verification.causes import statistics_of
from mtf_gradsync.tools.verification.recorded_program import Changes, RecordedProgram

_MANY = 1e6  # times the examples that each expert would have


def _replace_function(
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


def _expert_layers() -> list[tuple[Any, str]]:
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
        _replace_function(undo_stack, module, "dropout", unchanged)


def _drop_random(undo_stack: contextlib.ExitStack, random_sizes: list[int]) -> None:
    def constant(init: Any, op: Any, mesh: Any, shape: Any, tf_fn: Any, **kwargs: Any) -> None:
        def half(shape: Any, dtype: tf.DType = tf.float32, **more: Any) -> tf.Tensor:
            low, high = more.get("minval", 0.0), more.get("maxval")
            middle = (low + (1.0 if high is None else high)) / 2
            return tf.cast(tf.fill(shape, middle), dtype)

        init(op, mesh, shape, half, **kwargs)

    _replace_function(undo_stack, mtf.ops.RandomOperation, "__init__", constant)


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

    for module, name in _expert_layers():
        _replace_function(undo_stack, module, name, with_room)


# Functions that remove a part, such as dropout, from models that are built until an exit stack is
# closed. For each removed dropout, the second argument gets how many numbers it would have drawn.
_DROPS: dict[str, Callable[[contextlib.ExitStack, list[int]], None]] = {
    "dropout": _drop_dropout,
    "random": _drop_random,
    "capacity": _drop_capacity,
}
DROPS = tuple(_DROPS)


def _make_constant(tensors: Sequence[mtf.Tensor]) -> None:
    """Makes tensors constant: they are lowered to ones, and have no gradients.

    Call `_make_constant` before the mtf graph of `tensors` is lowered.
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
            _replace_function(undo_stack, owner, "__init__", function)
        for module in (mtf, mtf.ops):
            _replace_function(undo_stack, module, "cast", cast_to_wide)
        yield


@contextlib.contextmanager
def recording(changes: Changes) -> Iterator[RecordedProgram]:
    """Records the program that is built inside the block, and applies changes to it.

    Until the block ends, methods of optimizers and of Mesh-TensorFlow are replaced by methods that
    record what the program does. `changes` says how the program's stack of wrappers and its model
    are changed. The `with` statement gives the block a `RecordedProgram`. Once the program is
    built, this object says what was recorded.
    """
    recorded = RecordedProgram(changes)
    with contextlib.ExitStack() as undone:
        undone.callback(recorded.undo)

        def apply_one(method: Any, opt: Any, grad: Any, var: Any, *args: Any, **kwargs: Any) -> Any:
            def one(opt: Any, grads: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
                return method(opt, grads[0], variables[0], *args, **kwargs)

            return recorded.apply_gradients(one, opt, [grad], [var], *args, **kwargs)

        def watch(kind: type) -> None:
            if "apply_grads" in vars(kind):
                _replace_function(undone, kind, "apply_grads", recorded.apply_gradients)
            if "apply_grad" in vars(kind) and not issubclass(kind, Wrapper):
                _replace_function(undone, kind, "apply_grad", apply_one)

        for kind in _with_subclasses(mtf.optimize.Optimizer):
            watch(kind)

        # Programs define optimizers of their own, even while they are built.
        def watch_new(cls: type, **kwargs: Any) -> None:
            super(mtf.optimize.Optimizer, cls).__init_subclass__(**kwargs)
            watch(cls)

        mtf.optimize.Optimizer.__init_subclass__ = classmethod(watch_new)
        undone.callback(delattr, mtf.optimize.Optimizer, "__init_subclass__")
        _replace_function(
            undone, TrainOptimizerInterface, "compute_gradients", recorded.compute_gradients
        )

        def note_lowering(init: Any, lowering: mtf.Lowering, *args: Any, **kwargs: Any) -> None:
            init(lowering, *args, **kwargs)
            recorded.lowerings.append(lowering)

        _replace_function(undone, mtf.Lowering, "__init__", note_lowering)

        def note_losses(gradients: Any, ys: Any, *args: Any, **kwargs: Any) -> Any:
            recorded.record_losses(ys)
            if changes.statistics:
                _make_constant([x for _, x in statistics_of(recorded.losses, changes.statistics)])
            return gradients(ys, *args, **kwargs)

        for module in (mtf, mtf.ops):
            _replace_function(undone, module, "gradients", note_losses)
        if changes.unwrapped:
            for kind in _with_subclasses(Wrapper):
                if "__init__" in vars(kind):
                    _replace_function(undone, kind, "__init__", _init_for_one_core)
            # Wrappers that refuse one core have no stages there whose order could be checked.
            _replace_function(undone, Wrapper, "_check_order", lambda method, wrapper: None)
            # On one core there is nothing to reduce, and some operations of Mesh-TensorFlow do not
            # accept pending (not yet reduced) sums.
            _replace_function(undone, mtf.Lowering, "set_tensor_lowering", _reduce_at_once)

        def note_experts(layer: Any, *args: Any, **kwargs: Any) -> Any:
            recorded.has_experts = True
            return layer(*args, **kwargs)

        for module, name in _expert_layers():
            _replace_function(undone, module, name, note_experts)
        for name in changes.drops:
            _DROPS[name](undone, recorded.random_sizes)
        yield recorded


def _reduce_at_once(method: Any, lowering: mtf.Lowering, tensor: mtf.Tensor, value: Any) -> None:
    lazy = isinstance(value, mtf.LazyAllreduceSum)
    method(lowering, tensor, value.to_laid_out_tensor() if lazy else value)


def _init_for_one_core(init: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """Makes a wrapper in place of its `__init__`, also on a mesh of one core.

    Some wrappers raise ValueError on a mesh of one core, or for arguments that do not fit such a
    mesh. This function calls `init`, the wrapper's own `__init__`. If `init` raises ValueError
    after it has set all attributes of the wrapper, the error is ignored. If `init` raises it
    earlier, the function makes the wrapper from the arguments that all wrappers have.
    """
    try:
        init(wrapper, *args, **kwargs)
    except ValueError:
        if "_slots" in vars(wrapper) and wrapper._given_axes is not None:
            return  # the wrapper was complete when it refused a single replica
        kwargs = {**_gin_bindings(type(wrapper)), **kwargs}
        if not args and "opt" not in kwargs:
            raise
        opt = args[0] if args else kwargs["opt"]
        given = {k: kwargs[k] for k in ("axes", "mesh_shape", "layout") if k in kwargs}
        names = kwargs.get("batch_dims", "batch")
        name = kwargs.get("name", type(wrapper).__name__)
        rate = kwargs.get("learning_rate", NOT_GIVEN)
        common = CommonArguments(name, batch_dims=names, learning_rate=rate)
        try:
            wrapper._wrap(opt, common._replace(**given))
        except ValueError:  # it refuses these arguments
            wrapper._wrap(opt, common)


def _gin_bindings(kind: type) -> dict[str, Any]:
    """Returns the arguments that gin binds for a class; {} if gin does not know the class."""
    with contextlib.suppress(ValueError):
        return gin.get_bindings(kind)
    return {}


def _with_subclasses(kind: type) -> list[type]:
    """Returns a list of a class, its subclasses, their subclasses, and so on."""
    found: list[type] = [kind]
    for one in found:
        subclasses: list[type] = type.__subclasses__(one)
        found += [sub for sub in subclasses if sub not in found]
    return found
