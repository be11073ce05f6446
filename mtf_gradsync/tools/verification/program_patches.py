"""Patches of optimizers and of Mesh-TensorFlow that record and change a program as it is built."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import Any, Callable, Iterator

import gin

from mtf_gradsync.extension import (
    NOT_GIVEN,
    CommonArguments,
    TrainOptimizerInterface,
    Wrapper,
    mtf,
)
from mtf_gradsync.tools.verification.causes import statistics_of
from mtf_gradsync.tools.verification.model_changes import make_constant, remove_parts
from mtf_gradsync.tools.verification.recorded_program import Changes, RecordedProgram


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

        def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            method = owner.__dict__[name]
            made: Any = functools.wraps(method)(make(method))
            made.__signature__ = inspect.signature(method)
            setattr(owner, name, made)
            undone.callback(setattr, owner, name, method)

        def applies(method: Any) -> Any:
            def apply_grads(opt: Any, grads: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
                return recorded.apply_gradients(method, opt, grads, variables, *args, **kwargs)

            return apply_grads

        def applies_one(method: Any) -> Any:
            def one(opt: Any, grads: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
                return method(opt, grads[0], variables[0], *args, **kwargs)

            def apply_grad(opt: Any, grad: Any, var: Any, *args: Any, **kwargs: Any) -> Any:
                return recorded.apply_gradients(one, opt, [grad], [var], *args, **kwargs)

            return apply_grad

        def watch(kind: type) -> None:
            if "apply_grads" in vars(kind):
                replace(kind, "apply_grads", applies)
            if "apply_grad" in vars(kind) and not issubclass(kind, Wrapper):
                replace(kind, "apply_grad", applies_one)

        def computes(method: Any) -> Any:
            def compute_gradients(opt: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
                return recorded.compute_gradients(method, opt, loss, *args, **kwargs)

            return compute_gradients

        for kind in _with_subclasses(mtf.optimize.Optimizer):
            watch(kind)

        # Programs define optimizers of their own, even while they are built.
        def watch_new(cls: type, **kwargs: Any) -> None:
            super(mtf.optimize.Optimizer, cls).__init_subclass__(**kwargs)
            watch(cls)

        mtf.optimize.Optimizer.__init_subclass__ = classmethod(watch_new)
        undone.callback(delattr, mtf.optimize.Optimizer, "__init_subclass__")
        replace(TrainOptimizerInterface, "compute_gradients", computes)

        def notes(init: Any) -> Any:
            def lower(self: mtf.Lowering, *args: Any, **kwargs: Any) -> None:
                init(self, *args, **kwargs)
                recorded.lowerings.append(self)

            return lower

        replace(mtf.Lowering, "__init__", notes)

        differentiate = mtf.gradients

        def gradients(ys: Any, *args: Any, **kwargs: Any) -> Any:
            recorded.record_losses(ys)
            if changes.statistics:
                make_constant([x for _, x in statistics_of(recorded.losses, changes.statistics)])
            return differentiate(ys, *args, **kwargs)

        for module in (mtf, mtf.ops):
            undone.callback(setattr, module, "gradients", module.gradients)
            module.gradients = gradients
        if changes.unwrapped:
            for kind in _with_subclasses(Wrapper):
                if "__init__" in vars(kind):
                    replace(kind, "__init__", _init_for_one_core)
            # Wrappers that refuse one core have no stages there whose order could be checked.
            replace(Wrapper, "_check_order", lambda _: lambda wrapper: None)
            # On one core there is nothing to reduce, and some operations of Mesh-TensorFlow do not
            # accept pending (not yet reduced) sums.
            replace(mtf.Lowering, "set_tensor_lowering", _reduce_at_once)
        moe = sys.modules.get("mesh_tensorflow.transformer.moe")
        if moe is not None:

            def note_experts(layer: Any) -> Any:
                def noted(*args: Any, **kwargs: Any) -> Any:
                    recorded.has_experts = True
                    return layer(*args, **kwargs)

                return noted

            for name in ("transformer_moe_layer_v1", "transformer_moe_layer_v2"):
                replace(moe, name, note_experts)
        remove_parts(changes.drops, undone, recorded.random_sizes)
        yield recorded


def _reduce_at_once(method: Any) -> Any:
    def set_tensor_lowering(self: mtf.Lowering, tensor: mtf.Tensor, value: Any) -> None:
        lazy = isinstance(value, mtf.LazyAllreduceSum)
        method(self, tensor, value.to_laid_out_tensor() if lazy else value)

    return set_tensor_lowering


def _init_for_one_core(init: Any) -> Any:
    """Returns a replacement of a wrapper's `__init__` that also accepts a mesh of one core.

    Some wrappers raise ValueError on a mesh of one core, or for arguments that do not fit such a
    mesh. The replacement calls `init`, the wrapper's own `__init__`. If `init` raises ValueError
    after it has set all attributes of the wrapper, the error is ignored. If `init` raises it
    earlier, the replacement makes the wrapper from the arguments that all wrappers have.
    """

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except ValueError:
            if "_slots" in vars(self) and self._given_axes is not None:
                return  # the wrapper was complete when it refused a single replica
            kwargs = (
                {**gin.get_bindings(type(self)), **kwargs} if _has_gin_bindings(self) else kwargs
            )
            if not args and "opt" not in kwargs:
                raise
            opt = args[0] if args else kwargs["opt"]
            given = {k: kwargs[k] for k in ("axes", "mesh_shape", "layout") if k in kwargs}
            names = kwargs.get("batch_dims", "batch")
            name = kwargs.get("name", type(self).__name__)
            rate = kwargs.get("learning_rate", NOT_GIVEN)
            common = CommonArguments(name, batch_dims=names, learning_rate=rate)
            try:
                self._wrap(opt, common._replace(**given))
            except ValueError:  # it refuses these arguments
                self._wrap(opt, common)

    return made


def _has_gin_bindings(wrapper: Wrapper) -> bool:
    """Returns whether gin has bindings for arguments of the wrapper's class."""
    with contextlib.suppress(ValueError):
        return bool(gin.get_bindings(type(wrapper)))
    return False


def _with_subclasses(kind: type) -> list[type]:
    """Returns a list of a class, its subclasses, their subclasses, and so on."""
    found: list[type] = [kind]
    for one in found:
        subclasses: list[type] = type.__subclasses__(one)
        found += [sub for sub in subclasses if sub not in found]
    return found
