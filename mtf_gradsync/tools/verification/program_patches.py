"""Patches of optimizers and of Mesh-TensorFlow that record and change a program as it is built."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

import gin

from mtf_gradsync.extension import NOT_GIVEN, CommonArguments, TrainOptimizerInterface, Wrapper, mtf
from mtf_gradsync.tools.verification.causes import statistics_of
from mtf_gradsync.tools.verification.model_changes import (
    expert_layers,
    make_constant,
    remove_parts,
    replace_function,
)
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

        def apply_one(method: Any, opt: Any, grad: Any, var: Any, *args: Any, **kwargs: Any) -> Any:
            def one(opt: Any, grads: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
                return method(opt, grads[0], variables[0], *args, **kwargs)

            return recorded.apply_gradients(one, opt, [grad], [var], *args, **kwargs)

        def watch(kind: type) -> None:
            if "apply_grads" in vars(kind):
                replace_function(undone, kind, "apply_grads", recorded.apply_gradients)
            if "apply_grad" in vars(kind) and not issubclass(kind, Wrapper):
                replace_function(undone, kind, "apply_grad", apply_one)

        for kind in _with_subclasses(mtf.optimize.Optimizer):
            watch(kind)

        # Programs define optimizers of their own, even while they are built.
        def watch_new(cls: type, **kwargs: Any) -> None:
            super(mtf.optimize.Optimizer, cls).__init_subclass__(**kwargs)
            watch(cls)

        mtf.optimize.Optimizer.__init_subclass__ = classmethod(watch_new)
        undone.callback(delattr, mtf.optimize.Optimizer, "__init_subclass__")
        replace_function(
            undone, TrainOptimizerInterface, "compute_gradients", recorded.compute_gradients
        )

        def note_lowering(init: Any, lowering: mtf.Lowering, *args: Any, **kwargs: Any) -> None:
            init(lowering, *args, **kwargs)
            recorded.lowerings.append(lowering)

        replace_function(undone, mtf.Lowering, "__init__", note_lowering)

        def note_losses(gradients: Any, ys: Any, *args: Any, **kwargs: Any) -> Any:
            recorded.record_losses(ys)
            if changes.statistics:
                make_constant([x for _, x in statistics_of(recorded.losses, changes.statistics)])
            return gradients(ys, *args, **kwargs)

        for module in (mtf, mtf.ops):
            replace_function(undone, module, "gradients", note_losses)
        if changes.unwrapped:
            for kind in _with_subclasses(Wrapper):
                if "__init__" in vars(kind):
                    replace_function(undone, kind, "__init__", _init_for_one_core)
            # Wrappers that refuse one core have no stages there whose order could be checked.
            replace_function(undone, Wrapper, "_check_order", lambda method, wrapper: None)
            # On one core there is nothing to reduce, and some operations of Mesh-TensorFlow do not
            # accept pending (not yet reduced) sums.
            replace_function(undone, mtf.Lowering, "set_tensor_lowering", _reduce_at_once)

        def note_experts(layer: Any, *args: Any, **kwargs: Any) -> Any:
            recorded.has_experts = True
            return layer(*args, **kwargs)

        for module, name in expert_layers():
            replace_function(undone, module, name, note_experts)
        remove_parts(changes.drops, undone, recorded.random_sizes)
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
