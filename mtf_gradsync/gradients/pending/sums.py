"""Pending sums, and gradients as they are before them."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Sequence

from mtf_gradsync._common import warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import gradients_calls, loop_body, sum_made_by
from mtf_gradsync._private.tensorflow import control_flow_context
from mtf_gradsync.gradients.pending.flow import Cause, Flow, is_between_meshes
from mtf_gradsync.gradients.stage import StageOperation


class PendingSum(mtf.LazyAllreduceSum):
    """A lowered tensor that is the sum of a part on each processor.

    Parts and sum are made when they are first used, so that nothing unused is computed.

    Attributes:
      mesh_impl: the mesh that it lies on.
      mesh_axes: numbers of the mesh axes to sum over.
      add_counter_fn: Mesh-TF's, to be called when the sum is made.
      context: the loop or branch that it was made in.
    """

    def __init__(
        self,
        mesh_impl: mtf.MeshImpl,
        mesh_axes: list[int],
        slice_shape: list[int],
        make_part: Callable[[], Any],
        make_reduced: Callable[[PendingSum], None],
        add_counter_fn: Callable[[], None] | None = None,
        sources: Sequence[Any] = (),
    ):
        """Describes the sum; makes nothing.

        `make_part` returns the `LaidOutTensor` of the parts, and `make_reduced` calls `set_reduced`
        with that of the sum. `sources` are the lowered tensors that the sum is computed from, if it
        is not reduced itself.
        """
        self.mesh_impl = mesh_impl
        self.mesh_axes = list(mesh_axes)
        self.add_counter_fn = add_counter_fn
        self.context = current_context()
        self._slice_shape = list(slice_shape)
        self._make_part = make_part
        self._make_reduced = make_reduced
        self._part: Any = None
        self._reduced_value: Any = None
        self._sources = tuple(sources)

    @property
    def slice_shape(self) -> list[int]:
        """Shape of a processor's part, and of a slice of the sum."""
        return self._slice_shape

    @property
    def laid_out_input(self) -> Any:
        """The `LaidOutTensor` of the parts."""
        if self._part is None:
            self._part = self._make_part()
        return self._part

    @property
    def is_reduced(self) -> bool:
        """Whether the sum has been made."""
        return self._reduced_value is not None

    @property
    def is_complete(self) -> bool:
        """Whether both the parts and the sum have been made."""
        return self.is_reduced and self._part is not None

    @property
    def sends_nothing(self) -> bool:
        """Whether the sum has been made, or can be made without sending anything."""
        return self.is_reduced or (bool(self._sources) and all(map(_sends_nothing, self._sources)))

    def set_reduced(self, value: Any) -> None:
        """Sets the `LaidOutTensor` of the sum, which was reduced just now."""
        self._reduced_value = value
        if self.add_counter_fn:
            self.add_counter_fn()

    def to_laid_out_tensor(self) -> Any:
        """Returns the `LaidOutTensor` of the sum, made on the first call."""
        if self._reduced_value is None:
            self._make_reduced(self)
        return self._reduced_value

    @property
    def tensor_list(self) -> list[tf.Tensor]:
        """The slices of the sum."""
        return self.to_laid_out_tensor().tensor_list


def _sends_nothing(lowered: Any) -> bool:
    if isinstance(lowered, PendingSum):
        return lowered.sends_nothing
    return not isinstance(lowered, mtf.LazyAllreduceSum) or sum_made_by(lowered) is not None


def current_context() -> Any:
    """Returns the loop or branch that is being built, which tensors made in it belong to."""
    graph = tf.get_default_graph()
    return graph, control_flow_context(graph)


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
