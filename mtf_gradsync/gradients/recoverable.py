"""Checks whether per-shard gradients are recoverable, and warns if a sum over shards is missing.

Per-shard gradients are recoverable if each shard's own gradient can still be read from the gradient
of the whole batch.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Mapping, NoReturn, Sequence

from mtf_gradsync._common import some_lines, warn_once
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients.flow import Cause, Flow, Mixing, linear_positions
from mtf_gradsync.gradients.layout import (
    Axes,
    Layout,
    check_batch_dims,
    find_own_data_axes,
    names_of_batch,
    passes_on,
)
from mtf_gradsync.gradients.operations import (
    GradientOperation,
    MaybeGradients,
    gradient_name,
    in_place_of,
    reduced_values,
)
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.step import ValuesAfter
from mtf_gradsync.step.plan import flat


class GradientFromSums:
    """The operations that compute a gradient, linearly, from sums over the shards.

    Attributes:
      sums: pending (not yet reduced) tensors that the gradient is linear in. Each shard's part of
        them is recoverable.
      shared: further tensors that the gradient is linear in. They do not depend on any shard's
        data: the gradient of a penalty on weights is an example.
    """

    def __init__(
        self,
        grad: mtf.Tensor,
        sums: Sequence[mtf.Tensor],
        shared: Sequence[mtf.Tensor],
        operations: Sequence[mtf.Operation],
    ):
        """Records that `operations`, in order, compute `grad` from `sums` and `shared`."""
        self._grad, self._operations = grad, list(operations)
        self.sums, self.shared = list(sums), list(shared)

    def compute_from(self, sums: Sequence[mtf.Tensor], shared: Sequence[mtf.Tensor]) -> mtf.Tensor:
        """Returns the gradient that the same operations compute from other tensors.

        `sums` and `shared` replace the tensors in the attributes of these names. They have the same
        shapes, in the same order. Pending tensors among them are reduced first.
        """
        given = [*self.sums, *self.shared]
        return _ComputeAgain(self._grad, given, [*sums, *shared], self._operations).outputs[0]


class _ComputeAgain(GradientOperation):
    """An operation that runs given operations again, with `values` in place of the tensors `given`.

    Its output is the tensor that then takes the place of `result`.
    """

    def __init__(
        self,
        result: mtf.Tensor,
        given: Sequence[mtf.Tensor],
        values: Sequence[mtf.Tensor],
        operations: Sequence[mtf.Operation],
    ):
        self._result, self._operations = result, list(operations)
        made = {*given, *(t for op in operations for t in op.outputs)}
        factors = dict.fromkeys(t for op in operations for t in op.inputs if t not in made)
        self._replaced = [*given, *factors]
        super().__init__([*values, *factors], [result.shape], "make_again", [result.dtype])

    def lower(self, lowering: mtf.Lowering) -> None:
        made = {t: lowering.tensors[t] for op in self._operations for t in op.outputs}
        values = dict(zip(self._replaced, reduced_values(lowering, self.inputs)))
        with in_place_of(lowering, {**made, **values}):
            for operation in self._operations:
                operation.lower_itself(lowering)
            result = lowering.tensors[self._result].to_laid_out_tensor()
        self.set_outputs(lowering, [result])


def express_by_sums(grad: mtf.Tensor, flow: Flow, layout: Layout) -> GradientFromSums | None:
    """Returns how a gradient is computed, linearly, from recoverable sums; None if it is not.

    `flow` is a forecast of which operations keep sums pending; the gradient is one of its targets.
    `layout` is the layout that the forecast was made with.
    """
    replica_axes = layout.replica_axes(grad.mesh)
    outside = set(grad.graph.operations)

    def is_pending(tensor: mtf.Tensor) -> bool:
        return bool(flow.axes.get(tensor, frozenset()) & replica_axes)

    sums: dict[mtf.Tensor, None] = {}
    shared: dict[mtf.Tensor, None] = {}
    operations: set[mtf.Operation] = set()
    todo, seen = [grad], set()
    while todo:
        tensor = todo.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        operation = tensor.operation
        if tensor is not grad and flow.mixes_shards(tensor) is None:
            if layout.split(tensor) & replica_axes and is_pending(tensor):
                return None
            (sums if is_pending(tensor) else shared)[tensor] = None
            continue
        inputs = operation.inputs
        mixed = [i for i, x in enumerate(inputs) if is_pending(x) or flow.mixes_shards(x)]
        positions = mixed if passes_on(operation) else linear_positions(operation, mixed)
        if (
            not mixed
            or positions is None
            or operation not in outside
            or isinstance(operation, (mtf.ScalarAddOperation, mtf.CustomGradientOperation))
            or any(layout.split_over_shards(inputs[i]) for i in positions)
        ):
            return None
        operations.add(operation)
        todo += [inputs[i] for i in positions]
    in_order = [op for op in grad.graph.operations if op in operations]
    return GradientFromSums(grad, list(sums), list(shared), in_order) if sums else None


_ACCEPT = "give accept_summed=True to take an equal share of the gradient for each shard"
# For each cause what the operation does, and how to avoid it.
_SAYS = {
    Cause.NEEDS_SUM: (
        "needs the sum over all shards and is not linear in it (a norm of all gradients, a "
        "product of two gradients), or spreads it (a broadcast of the sum to the batch, or to a "
        "variable that is split over the mesh axis of the batch)",
        "Compute this inside the optimizer (ClipByGlobalNormOptimizer clips the reduced "
        f"gradients), split the variable over another mesh axis, or {_ACCEPT}",
    ),
    Cause.GATHERS: (
        "gathers the values of all shards without a sum (a reshape to dimensions that the layout "
        "does not split, or splits otherwise, as one that sends examples to experts; a maximum "
        "over the batch; an operation of the program's own)",
        "Keep the dimension of the batch split in this operation (in a mixture of experts, "
        "split its groups as the batch is split, and experts over another mesh axis: the layout "
        "rules batch_unsplit:batch and experts:model in Mesh-TensorFlow's transformer), or "
        + _ACCEPT,
    ),
    Cause.DROPS_SUM: (
        "runs on each processor's slices alone and drops a dimension that the slices are split "
        "along, so that each shard has a different result, and no operation sums the results",
        "Keep that dimension in the result, with the size of its mesh axis, and sum over it with "
        "mtf.reduce_sum",
    ),
    Cause.SPLIT: (
        "makes a tensor that the layout splits over the mesh axis of the batch, and a shard's "
        "slice of this tensor is not computed from that shard's data alone",
        f"Split the variable over another mesh axis, or {_ACCEPT}",
    ),
}


class Recoverability:
    """For each of a list of gradients: whether every shard's own gradient is recoverable from it.

    The keys of all attributes are positions in the list of gradients.

    Attributes:
      mixed: the gradients from which shards' own gradients are not recoverable. The values say
        which operation mixed the shards' data, and why.
      from_sums: those gradients of `mixed` that are linear in recoverable sums. The values say how
        they are computed from the sums.
      shared: the gradients that do not depend on any shard's data, such as the gradient of a
        penalty on weights, although they are split over a replica axis. Each shard's own gradient
        is then an equal share of the whole gradient. The values name the gradient's operation.
    """

    def __init__(self, grads: MaybeGradients, axes: ReplicaAxes, within: ReplicaAxes | None = None):
        """Examines gradients without shard dims.

        `axes` are the replica axes whose shards' gradients are to be recovered, on the mesh that
        the program will be lowered on. If the batch is split over further mesh axes, `within` has
        all axes that split it. Raises ValueError if the batch is split over a mesh axis that is in
        neither argument.
        """
        self.mixed: dict[int, Mixing] = {}
        self.from_sums: dict[int, GradientFromSums] = {}
        self.shared: dict[int, Mixing] = {}
        self._grads, self._flow, self._axes = grads, None, Axes(axes.mesh_axes)
        self._layout = axes
        present = _gradients_to_examine(grads, axes, within)
        if not present:
            return
        graph, layout = present[0].graph, Layout.of(axes, present[0].mesh)
        own = find_own_data_axes(graph, layout, names_of_batch(present, axes))
        layout = layout._replace(own_data_axes=own)
        flow = self._flow = Flow(graph, present, layout)
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            mixing = flow.mixes_shards(grad)
            if mixing is not None:
                self.mixed[i] = mixing
                made = express_by_sums(grad, flow, layout)
                if made is not None:
                    self.from_sums[i] = made
            elif layout.split(grad) & set(axes.mesh_axes) - layout.split_over_shards(grad):
                is_pending = flow.axes.get(grad, Axes()).intersection(axes.mesh_axes)
                is_known = not is_pending and not _is_computed_by_package(flow, grad)
                found = self.shared if is_known else self.mixed
                found[i] = Mixing(grad.operation, Cause.SPLIT)

    def term_without_data(self, i: int) -> mtf.Tensor | None:
        """Returns the term of a gradient that no shard's data changes; None if it has no such term.

        The gradient is at position `i` of the list, and each shard's own gradient must be
        recoverable from it. If the loss has a penalty on weights, the term is the gradient of the
        penalty. A sum that a loop makes counts as dependent on data.
        """
        grad, flow = self._grads[i], self._flow
        if grad is None or flow is None:
            return None
        data: dict[mtf.Tensor, None] = {}
        shared: dict[mtf.Tensor, None] = {}
        operations: dict[mtf.Operation, None] = {}
        todo = [grad]
        while todo:
            tensor = todo.pop()
            operation = tensor.operation
            if not flow.axes.get(tensor, Axes()) & self._axes:
                shared[tensor] = None
            elif not flow.keeps_pending(operation):
                data[tensor] = None
            elif operation not in operations:
                operations[operation] = None
                use = flow.uses.get(operation)
                inputs = operation.inputs
                todo += [inputs[i] for i in use.positions] if use else inputs
        adds = any(isinstance(op, mtf.ScalarAddOperation) for op in operations)
        if not (shared or adds) or not operations:
            return grad if shared else None
        in_order = [op for op in grad.graph.operations if op in operations]
        zeros = [mtf.zeros(x.mesh, x.shape, x.dtype) for x in data]
        return GradientFromSums(grad, list(data), list(shared), in_order).compute_from(
            zeros, list(shared)
        )

    def check(self, names: Sequence[str] | None = None, recomputes: bool = False) -> None:
        """Raises ValueError unless per-shard gradients are recoverable.

        The error lists the gradients and the operations that mix shards, and says what to do. It
        calls the gradients by `names`, or by their variables if `names` is None. If the layout is
        one that Mesh-TF cannot lower, the error is about the layout instead. If `recomputes` is
        true, the gradients in the attributes `from_sums` and `shared` raise no error, because the
        caller computes each shard's part of them from these attributes.
        """
        bad = {**self.mixed, **self.shared}
        if recomputes:
            fine = {*self.from_sums, *self.shared}
            bad = {i: mixing for i, mixing in bad.items() if i not in fine}
        if bad:
            _raise_not_recoverable(self._grads, bad, names, self._layout)


def _is_computed_by_package(flow: Flow, grad: mtf.Tensor) -> bool:
    """Returns whether an operation of this package is among those that compute `grad`.

    If it is, the dimensions of the operations' tensors do not tell what the gradient depends on.
    """
    return any(isinstance(op, (GradientOperation, ValuesAfter)) for op in flow.before(grad))


def _gradients_to_examine(
    grads: MaybeGradients, axes: ReplicaAxes, within: ReplicaAxes | None = None
) -> list[mtf.Tensor]:
    """Returns the gradients that are not None; [] if there is only one shard, as nothing can mix.

    Raises ValueError if the batch is split over a mesh axis that is not in `within` (in `axes`, if
    `within` is None).
    """
    present = [g for g in grads if g is not None]
    if present:
        check_batch_dims(present, within or axes)
    return present if axes.num_shards > 1 else []


def mixed_gradients(grads: MaybeGradients, axes: ReplicaAxes) -> dict[int, Mixing]:
    """Returns the gradients that are not sums of one term per shard, with the operation at fault.

    The keys of the result are positions in `grads`, which are gradients without shard dims. `axes`
    are the replica axes. All gradients that are not in the result are sums of terms that the shards
    hold, so that these terms can be added up later. A shard's term need not come from the shard's
    own examples: the shard that holds an expert has the expert's gradient for all shards' examples.
    """
    present = _gradients_to_examine(grads, axes)
    if not present:
        return {}
    flow = _flow(present, axes)
    found = {i: flow.mixes_shards(g) for i, g in enumerate(grads) if g is not None}
    return {i: mixing for i, mixing in found.items() if mixing is not None}


def summed_over_other_axes(grads: MaybeGradients, axes: ReplicaAxes) -> list[int]:
    """Returns the positions of gradients for which `per_shard` may need an extra all-reduce.

    The gradients at these positions may be pending over mesh axes other than the replica axes, and
    `per_shard` then reduces them over those other axes. Each all-reduce has the size of the
    gradient.
    """
    present = [g for g in grads if g is not None]
    if not present:
        return []
    flow = _flow(present, axes)
    sums_first = any(use.first for use in flow.uses.values())
    replica_axes = set(axes.mesh_axes)
    found = {g for g in present if sums_first or flow.axes.get(g, frozenset()) - replica_axes}
    return [i for i, g in enumerate(grads) if g in found]


def pending_over_shards(grads: Sequence[mtf.Tensor], axes: ReplicaAxes) -> list[bool]:
    """Returns a bool for each of `grads`: whether it is pending over a replica axis.

    The gradients are of one mesh and have no shard dims. `axes` are the replica axes.
    """
    if not grads:
        return []
    flow = _flow(grads, axes)
    return [bool(flow.axes.get(g, frozenset()) & set(axes.mesh_axes)) for g in grads]


def _flow(grads: Sequence[mtf.Tensor], axes: ReplicaAxes) -> Flow:
    return Flow(grads[0].graph, grads, Layout.of(axes, grads[0].mesh))


def check_recoverable(
    grads: MaybeGradients,
    axes: ReplicaAxes,
    names: Sequence[str] | None = None,
    recomputes: bool = False,
    within: ReplicaAxes | None = None,
) -> None:
    """Raises ValueError unless each shard's own gradients are recoverable from `grads`.

    Args:
      grads: gradients without shard dims; None passes.
      axes: the replica axes whose shards' gradients are to be recovered.
      names: a name for each of `grads`, for the error; None takes the names of their variables.
      recomputes: as for `Recoverability.check`.
      within: as for `Recoverability`.
    """
    Recoverability(grads, axes, within).check(names, recomputes)


def check_addable(grads: MaybeGradients, axes: ReplicaAxes, names: Sequence[str]) -> None:
    """Raises ValueError unless all gradients are sums of one term per shard.

    `names` has the name of each gradient's variable, for the error. `grads` and `axes` are as for
    `mixed_gradients`, which also says what counts as a sum of one term per shard.
    """
    mixed = mixed_gradients(grads, axes)
    if mixed:
        _raise_not_recoverable(grads, mixed, names, axes)


def _raise_not_recoverable(
    grads: MaybeGradients,
    mixed: dict[int, Mixing],
    names: Sequence[str] | None,
    axes: ReplicaAxes,
) -> NoReturn:
    """Raises the ValueError that lists gradients and the operations that mixed their shards.

    The keys of `mixed` are the positions of these gradients in `grads`, and the values are the
    operations and causes. `names` has a name for each of `grads`; None takes the names of their
    variables. If the layout of `axes` splits a tensor so that Mesh-TF cannot lower it, the error is
    about this tensor instead.
    """
    mesh = next(g.mesh for g in grads if g is not None)
    for operation in flat(mesh.graph.operations):
        for tensor in operation.outputs if operation.mesh is mesh else ():
            try:
                axes.layout.tensor_layout(tensor.shape, axes.mesh_shape)
            except ValueError as error:
                raise ValueError(
                    f"{str(error).strip()}: this is the shape of {tensor.name!r}. Split one of the "
                    "two dimensions over another mesh dimension, or rename one of them "
                    "(mtf.rename_dimension)."
                ) from error
    paragraphs = []
    for cause in dict.fromkeys(mixing.cause for mixing in mixed.values()):
        lines = []
        for i, (operation, why) in mixed.items():
            grad = grads[i]
            if why is cause and grad is not None:
                name = names[i] if names else f"gradient {i} ({gradient_name(grad)})"
                lines.append(f"\n  {name}: {type(operation).__name__} {operation.name!r}")
        what, cure = _SAYS[cause]
        paragraphs.append(f"an operation {what}:{some_lines(lines)}\n{cure}.")
    raise ValueError(
        "Per-shard gradients are not recoverable from some gradients, because "
        + "\nThey are not recoverable from other gradients, because ".join(paragraphs)
    )


# The methods that communicate; all others of `mtf.MeshImpl` are made of these.
_COLLECTIVES = ("allreduce", "allconcat", "alltoall", "receive", "shift_by_n_processors")


class MissingSumWarnings:
    """Warnings of operations that lack a sum over the shards, so that shards have other values."""

    def __init__(self, found: Mapping[mtf.Operation, tuple[Cause, mtf.Tensor]]):
        """Sets the operations to watch, which are the keys of `found`.

        `found` is the result of `Flow.dropped_sums`. The value of each operation is a pair: the
        cause, and a gradient that is computed by the operation and needs the sum.
        """
        self._found = found

    @contextlib.contextmanager
    def watching(self, operation: mtf.Operation, lowering: mtf.Lowering) -> Iterator[None]:
        """Returns a context for lowering `operation`; warns at its end if the sum is missing.

        There is no warning of operations that were not given to the constructor. An operation that
        gathers values of all shards (`Cause.GATHERS`) may make the sum itself: there is no warning
        if it communicated while it was lowered, or if it left its output pending.
        """
        if operation not in self._found:
            yield
            return
        cause, target = self._found[operation]
        with _record_collectives(lowering.mesh_impl(operation)) as sent:
            yield
        is_left = any(
            isinstance(lowering.tensors.get(t), mtf.LazyAllreduceSum) for t in operation.outputs
        )
        if cause is Cause.DROPS_SUM or not (sent or is_left):
            warn_once(
                f"unsummed {operation.name}",
                "%s %r drops a dimension that the shards split, and nothing sums over it: each "
                "shard has other values of %s, and the replicas of its variable differ after an "
                "update. Keep that dimension in the result, with the size of its mesh axis, and "
                "sum over it with mtf.reduce_sum.",
                type(operation).__name__,
                operation.name,
                gradient_name(target),
            )


@contextlib.contextmanager
def _record_collectives(mesh_impl: Any) -> Iterator[list[str]]:
    """Returns a context that records which collective methods of a mesh are called inside of it.

    The value of the context is a list, to which each call adds the method's name, such as
    "allreduce".
    """
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
