"""Per-shard gradients: whether they are recoverable, how they are split, and how they are summed.

Per-shard gradients are recoverable if each shard's own gradient can still be read from the gradient
of the whole batch.
"""

from __future__ import annotations

from typing import NoReturn, Sequence

from mtf_gradsync._common import check_flag, map_by_key, some_lines, warn_once
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients.arguments import check_gradients, check_one_mesh
from mtf_gradsync.gradients.flow import Cause, Flow, Mixing
from mtf_gradsync.gradients.layout import (
    Axes,
    Layout,
    batch_dim_names,
    check_batch_dims,
    find_own_data_axes,
)
from mtf_gradsync.gradients.operations import (
    GradientOperation,
    MaybeGradients,
    gradient_name,
    map_present,
    partial_sum,
    reduce_partial_sums,
    reshaped,
    terms_of_processors,
)
from mtf_gradsync.gradients.pending import PendingSums
from mtf_gradsync.gradients.reduce_gradients import GradientFromSums, express_by_sums
from mtf_gradsync.mesh.axes import ReplicaAxes, check_axes
from mtf_gradsync.reduce import FusedAllReduce, Strategy, check_strategy
from mtf_gradsync.reduce.strategy import has_gradient_reduction
from mtf_gradsync.step.conditional import ValuesAfter
from mtf_gradsync.step.plan import flat
from mtf_gradsync.step.writes import ProgramWrites


def shard_dims_in(shape: mtf.Shape, axes: ReplicaAxes) -> list[mtf.Dimension]:
    """Returns the dims of a shape that have the name of a shard dim of `axes`."""
    names = {d.name for d in axes.shard_dims}
    return [d for d in shape.dims if d.name in names]


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

    All attributes are dictionaries. Their keys are positions in the list of gradients.

    Attributes:
      mixed: the gradients from which shards' own gradients are not recoverable. The values say
        which operation mixed the shards' data, and why.
      from_sums: those gradients of `mixed` that are linear in recoverable sums. The values say how
        they are computed from the sums.
      shared: the gradients that are split over a replica axis, although they do not depend on any
        shard's data: the gradient of a penalty on weights, for example. Each shard's own gradient
        is then an equal share of the whole gradient. The values have the gradient's operation.
    """

    def __init__(self, grads: MaybeGradients, axes: ReplicaAxes, within: ReplicaAxes | None = None):
        """Examines gradients that are not split by shard; None in `grads` is passed over.

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
        own = find_own_data_axes(graph, layout, batch_dim_names(present, axes))
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
        computed = GradientFromSums(grad, in_order, list(data), list(shared))
        return computed.compute_from(zeros, computed.shared)

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

    If an operation of this package is among them, the dimensions of the operations' tensors do not
    tell what the gradient depends on.
    """
    return any(
        isinstance(op, (GradientOperation, ValuesAfter)) for op in flow.operations_before(grad)
    )


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

    The keys of the result are positions in `grads`, which are gradients that are not split by
    shard. `axes` are the replica axes. Every other gradient is a sum of terms, one for each shard,
    that can be added up later. A shard's term need not come from the shard's own examples: the
    shard that holds an expert has the expert's gradient for all shards' examples.
    """
    present = _gradients_to_examine(grads, axes)
    if not present:
        return {}
    flow = _flow(present, axes)
    found = {i: flow.mixes_shards(g) for i, g in enumerate(grads) if g is not None}
    return {i: mixing for i, mixing in found.items() if mixing is not None}


def summed_over_other_axes(grads: MaybeGradients, axes: ReplicaAxes) -> list[int]:
    """Returns the positions of gradients for which `per_shard` may need an extra all-reduce.

    The gradients at these positions may be pending over mesh axes other than the replica axes. Then
    `per_shard` reduces them over those other axes. For each of these gradients, the extra
    all-reduce is as large as the gradient.
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

    The gradients are of one mesh and are not split by shard. `axes` are the replica axes.
    """
    if not grads:
        return []
    flow = _flow(grads, axes)
    return [bool(flow.axes.get(g, frozenset()) & set(axes.mesh_axes)) for g in grads]


def _flow(grads: Sequence[mtf.Tensor], axes: ReplicaAxes) -> Flow:
    return Flow(grads[0].graph, grads, Layout.of(axes, grads[0].mesh))


def check_addable(grads: MaybeGradients, axes: ReplicaAxes, names: Sequence[str]) -> None:
    """Raises ValueError unless all gradients are sums of one term per shard.

    `grads` are gradients that are not split by shard, and `axes` are the replica axes. `names` has
    the name of each gradient's variable, for the error. A shard's term need not come from the
    shard's own examples (see `mixed_gradients`).
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


class SplitIntoShards(GradientOperation):
    """A split of gradients into one per shard, without communication along the replica axes."""

    is_linear = True

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        axes: ReplicaAxes,
        strategy: Strategy,
        accept_summed: bool,
    ):
        self._axes = axes
        self._strategy = strategy
        self._accept_summed = accept_summed
        PendingSums.declare_use(grads, False, [d.name for d in axes.shard_dims], strategy)
        shapes = [mtf.Shape([*axes.free_shard_dims(g.shape), *g.shape.dims]) for g in grads]
        super().__init__(grads, shapes, name="per_shard")

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        self._axes.check_mesh_impl(mesh_impl)
        axis_of = dict(zip(self._axes.shard_dims, self._axes.mesh_axes))
        replica_axes = [
            {axis_of[d] for d in self._axes.free_shard_dims(grad.shape)} for grad in self.inputs
        ]
        no_dims = [()] * len(self.inputs)
        terms = terms_of_processors(lowering, self.inputs, no_dims, replica_axes, self._strategy)
        if not self._accept_summed:
            for grad, axes in zip(self.inputs, replica_axes):
                self._check_not_summed(lowering, grad, axes)
        shapes = [mesh_impl.slice_shape(output.shape) for output in self.outputs]
        self.set_outputs(lowering, [reshaped(mesh_impl, *x) for x in zip(terms, shapes)])

    def _check_not_summed(
        self, lowering: mtf.Lowering, grad: mtf.Tensor, replica_axes: set[int]
    ) -> None:
        """Raises ValueError if an operation that computes a gradient has summed over shards.

        When the graph was built, the gradient was expected to be pending over the mesh axes
        `replica_axes`, so that each shard's term could be read.
        """
        operation = PendingSums.of_lowering(lowering).unexpected_sum(grad, replica_axes)
        if operation is not None:
            raise ValueError(
                f"Per-shard gradients are not recoverable from {gradient_name(grad)}: "
                f"{type(operation).__name__} {operation.name!r} summed over the shards when it was "
                f"lowered on mesh {lowering.mesh_impl(self).shape}. Give accept_summed=True to "
                "take an equal share for each shard."
            )


class SumGradients(GradientOperation):
    """A reduction of pending and per-shard gradients of one mesh; all are reduced together."""

    is_linear = True

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        sum_dims: Sequence[Sequence[mtf.Dimension]],
        strategy: Strategy,
        batch_dims: Sequence[str] | None = None,
    ):
        """Adds the operation, which has an output for each gradient: its sum, without `sum_dims`.

        Args:
          grads: gradients of one mesh.
          sum_dims: for each gradient, the dims to sum over, which are dimensions that number the
            shards. A gradient without such dims is reduced if it is pending.
          strategy: the strategy that reduces.
          batch_dims: the names of the dimensions that the batch is split along; None finds them in
            the graph.
        """
        self._sum_dims = [list(dims) for dims in sum_dims]
        self._strategy = strategy
        plain = [g for g, dims in zip(grads, self._sum_dims) if not dims]
        PendingSums.declare_use(plain, True, batch_dims, strategy)
        shapes = [
            mtf.Shape([d for d in g.shape.dims if d not in dims])
            for g, dims in zip(grads, self._sum_dims)
        ]
        super().__init__(grads, shapes, name="sum_gradients")

    def lower(self, lowering: mtf.Lowering) -> None:
        # Gradients without shard dims are pending: their own all-reduce sums them.
        sums = [
            partial_sum(lowering, grad, dims, reduced=not dims)
            for grad, dims in zip(self.inputs, self._sum_dims)
        ]
        mesh_impl = lowering.mesh_impl(self)
        self.set_outputs(lowering, reduce_partial_sums(mesh_impl, sums, self._strategy))


def per_shard(
    grads: MaybeGradients,
    axes: ReplicaAxes,
    reducer: Strategy | None = None,
    accept_summed: bool = False,
) -> list[mtf.Tensor | None]:
    """Returns one gradient per shard, without communication over replica axes.

    Each processor keeps the partial sum that it has. A gradient that does not depend on the batch
    (the gradient of a penalty on weights, say) is divided equally among the shards. If the layout
    splits the dimensions of a gradient over a replica axis (the gradient of an expert, say), the
    gradient gets no shard dim for that axis: each shard holds its own part already.

    Args:
      grads: pending or reduced gradients, of the shapes of their variables (`var dims`). None
        passes through, and so do gradients that are per shard already, whose first dimensions
        number the shards.
      axes: the replica axes.
      reducer: the reduction strategy for gradients that are pending over mesh axes other than the
        replica axes; None takes `FusedAllReduce()`.
      accept_summed: what happens if shards' own gradients are not recoverable from a gradient
        (after a clip by the global norm, for example). If true, each shard takes an equal share of
        the gradient; if false, it is an error.

    Returns:
      A list of tensors of shape `[shard dims...] + var dims`, in the dtypes of the gradients;
      their sum over the shard dims is the gradient.

    Raises:
      TypeError: grads or axes are of the wrong type.
      ValueError: shards' gradients are not recoverable (the error names the gradients, and the
        operations that mixed shards), or the batch is split along a dimension that axes lacks.

    Examples:
      >>> mesh = mtf.Mesh(mtf.Graph(), "mesh")
      >>> batch, size = mtf.Dimension("batch", 8), mtf.Dimension("size", 2)
      >>> x = mtf.import_tf_tensor(mesh, tf.ones([8, 2]), [batch, size])
      >>> w = mtf.get_variable(mesh, "w", [size], initializer=tf.ones_initializer())
      >>> grads = mtf.gradients([mtf.reduce_mean(x * w)], [w])
      >>> axes = gs.ReplicaAxes("all:4", "batch:all")
      >>> grads[0].shape, gs.per_shard(grads, axes)[0].shape
      (Shape[size=2], Shape[batch=4, size=2])
    """
    grads = check_gradients(grads)
    check_one_mesh(grads, "per_shard")
    check_axes(axes)
    accept_summed = check_flag("accept_summed", accept_summed)
    strategy = check_strategy(FusedAllReduce() if reducer is None else reducer)
    if not accept_summed:
        own = [None if g is None or shard_dims_in(g.shape, axes) else g for g in grads]
        Recoverability(own, axes).check()
    return split_into_shards(grads, axes, strategy, accept_summed)


def split_into_shards(
    grads: MaybeGradients, axes: ReplicaAxes, strategy: Strategy, accept_summed: bool
) -> list[mtf.Tensor | None]:
    """Returns one gradient per shard, as `per_shard` does, without a check of the gradients.

    Args:
      grads: pending, reduced or per-shard gradients, which may be None.
      axes: the replica axes.
      strategy: the strategy that reduces over mesh axes other than the replica axes.
      accept_summed: what happens to a gradient from which shards' own gradients are not
        recoverable. If true, each shard takes an equal share of it; if false, it is an error.
    """
    pending = [None if g is None or shard_dims_in(g.shape, axes) else g for g in grads]

    def make(present: list[mtf.Tensor]) -> Sequence[mtf.Tensor]:
        if accept_summed:
            check_batch_dims(present, axes)
        return SplitIntoShards(present, axes, strategy, accept_summed).outputs

    return [new if new is not None else old for new, old in zip(map_present(pending, make), grads)]


def sum_shards(
    grads: MaybeGradients, axes: ReplicaAxes | None = None, reducer: Strategy | None = None
) -> list[mtf.Tensor | None]:
    """Reduces gradients over the shards and all other mesh axes that they are pending over.

    All gradients of a mesh are reduced together. The program's own assignments (by `mtf.assign`, or
    by an optimizer without a wrapper) wait for the sums that were made before them. They also wait
    for the reads of all variables, so that no variable is written before all have been read.

    Args:
      grads: gradients per shard and others. Gradients per shard, of shape `[shard dims...] + var
        dims`, are summed over the shard dims. Other gradients are reduced if they are pending. None
        passes through.
      axes: the replica axes; None if no gradient is per shard.
      reducer: the reduction strategy; None takes `FusedAllReduce()`. A strategy that compresses an
        optimizer's gradients, such as `QuantizedAllReduce`, does not compress here; a warning says
        so.

    Returns:
      A list of reduced gradients of shape `var dims`.

    Raises:
      TypeError: grads, axes or reducer are of the wrong type.
    """
    grads = check_gradients(grads)
    if axes is not None:
        check_axes(axes)
    strategy = check_strategy(FusedAllReduce() if reducer is None else reducer)
    if has_gradient_reduction(strategy):
        warn_once(
            f"sum_shards {type(strategy).__name__}",
            "sum_shards does not compress gradients by %s, because the state of this strategy "
            "belongs to the variables of an optimizer: the gradients are reduced as all other sums "
            "are. Give the strategy to a wrapper, such as CrossShardOptimizer(opt, reducer=...).",
            type(strategy).__name__,
        )
    batch_dims = None if axes is None else axes.batch_dims

    def make(present: list[mtf.Tensor]) -> Sequence[mtf.Tensor]:
        sum_dims = [[] if axes is None else shard_dims_in(g.shape, axes) for g in present]
        sums = sum_gradients(present, sum_dims, strategy, batch_dims)
        for mesh in dict.fromkeys(x.mesh for x in sums):
            ProgramWrites.wait_for([x for x in sums if x.mesh is mesh])
        return sums

    return map_present(grads, make)


def sum_gradients(
    grads: Sequence[mtf.Tensor],
    sum_dims: Sequence[Sequence[mtf.Dimension]],
    strategy: Strategy,
    batch_dims: Sequence[str] | None = None,
) -> list[mtf.Tensor]:
    """Returns the sum of each gradient; gradients may be on several meshes.

    All gradients of a mesh are reduced together. `sum_dims` has for each gradient the dims to sum
    over, which number the shards; a gradient without such dims is reduced if it is pending.
    `batch_dims` are the names of the dimensions that the batch is split along; if it is None, they
    are found in the graph. `strategy` is the reduction strategy.
    """

    def of_mesh(mesh: mtf.Mesh, some: list[int]) -> Sequence[mtf.Tensor]:
        del mesh
        dims = [sum_dims[i] for i in some]
        return SumGradients([grads[i] for i in some], dims, strategy, batch_dims).outputs

    return map_by_key([g.mesh for g in grads], of_mesh)
