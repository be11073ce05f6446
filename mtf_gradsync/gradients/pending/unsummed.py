"""Finds, while a graph is lowered, operations that drop the sum over the shards."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Sequence

from mtf_gradsync._private.gradients_calls import gradients_calls
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import loop_body
from mtf_gradsync._warn import warn_once
from mtf_gradsync.gradients.pending.flow import Cause, Flow, is_between_meshes
from mtf_gradsync.gradients.stage import StageOperation

# The methods that communicate; all others of `mtf.MeshImpl` are made of these.
_COLLECTIVES = ("allreduce", "allconcat", "alltoall", "receive", "shift_by_n_processors")


class Unsummed:
    """Warns where an operation behind a gradient drops the sum over the shards."""

    def __init__(self, flow: Flow, targets: Sequence[mtf.Tensor]):
        """Looks for such operations behind the targets, which are gradients."""
        self._found: dict[mtf.Operation, tuple[Cause, mtf.Tensor]] = {}
        for target in targets if flow.any_gathers else ():
            mixing = flow.mixes_shards(target, (Cause.DROPS_SUM, Cause.GATHERS))
            if mixing is not None and _is_suspect(mixing.operation, mixing.cause):
                self._found.setdefault(mixing.operation, (mixing.cause, target))

    @contextlib.contextmanager
    def watching(self, operation: mtf.Operation, lowering: mtf.Lowering) -> Iterator[None]:
        """Warns, unless the operation that is lowered inside of the block sums by itself."""
        if operation not in self._found:
            yield
            return
        cause, target = self._found[operation]
        with _noting_collectives(lowering.mesh_impl(operation)) as sent:
            yield
        is_left = any(
            isinstance(lowering.tensors.get(t), mtf.LazyAllreduceSum) for t in operation.outputs
        )
        if cause is Cause.DROPS_SUM or not (sent or is_left):
            warn_once(
                f"unsummed {operation.name}",
                "%s %r drops a dimension that the shards split, and nothing sums over it: each "
                "shard has other values of %s, and the replicas of its variable differ after an "
                "update. Give the result that dimension, of the size of its mesh axis, and sum "
                "over it with mtf.reduce_sum.",
                type(operation).__name__,
                operation.name,
                gradient_name(target),
            )


def gradient_name(grad: mtf.Tensor) -> str:
    """Names a gradient by its variable, if it comes from `mtf.gradients`."""
    variable_of = {
        y: x
        for call in gradients_calls(grad.graph)
        for y, x in zip(call.outputs, call.inputs)
        if isinstance(x.operation, mtf.Variable)
    }
    tensor = grad
    while tensor not in variable_of:
        operation = tensor.operation
        if tensor not in operation.outputs or not operation.inputs:
            return f"gradient {grad.name!r}"
        position = operation.outputs.index(tensor)
        if isinstance(operation, mtf.WhileLoopOperation):
            tensor = loop_body(operation).outputs[position]
        else:
            # A list of gradients, or a gradient and what it is multiplied by.
            inputs = operation.inputs
            tensor = inputs[position if len(inputs) >= len(operation.outputs) else 0]
    return f"the gradient of variable {variable_of[tensor].operation.name!r}"


def _is_suspect(operation: mtf.Operation, cause: Cause) -> bool:
    if is_between_meshes(operation):
        return False  # it communicates by itself, in a way that the dimensions do not show
    of_mesh_tf = type(operation).__module__.startswith("mesh_tensorflow")
    is_own = not of_mesh_tf and not isinstance(operation, StageOperation)
    return cause is Cause.DROPS_SUM or is_own


@contextlib.contextmanager
def _noting_collectives(mesh_impl: Any) -> Iterator[list[str]]:
    """Lists the collectives that are made inside the block."""
    sent: list[str] = []

    def noting(name: str) -> Any:
        made = getattr(mesh_impl, name)

        def make(*args: Any, **kwargs: Any) -> Any:
            sent.append(name)
            return made(*args, **kwargs)

        return make

    names = [name for name in _COLLECTIVES if hasattr(mesh_impl, name)]
    for name in names:
        vars(mesh_impl)[name] = noting(name)
    try:
        yield sent
    finally:
        for name in names:
            del vars(mesh_impl)[name]
