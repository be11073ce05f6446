"""Splits pending gradients by shard, and reduces them."""

from __future__ import annotations

from typing import Sequence

from mtf_gradsync._common import by_key, check_flag, warn_once
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients.arguments import check_gradients, check_one_mesh
from mtf_gradsync.gradients.layout import check_batch_dims
from mtf_gradsync.gradients.operations import (
    GradientOperation,
    MaybeGradients,
    gradient_name,
    on_present,
    partial_sum,
    reduce_partial_sums,
    reshaped,
    terms_of_processors,
)
from mtf_gradsync.gradients.pending import PendingSums
from mtf_gradsync.gradients.recoverable import check_recoverable
from mtf_gradsync.mesh.axes import ReplicaAxes, check_axes
from mtf_gradsync.reduce import FusedAllReduce, Strategy, check_strategy
from mtf_gradsync.reduce.strategy import has_gradient_reduction
from mtf_gradsync.step import ProgramWrites


def shard_dims_in(shape: mtf.Shape, axes: ReplicaAxes) -> list[mtf.Dimension]:
    """Returns the dims of a shape that have the name of a shard dim of `axes`."""
    names = {d.name for d in axes.shard_dims}
    return [d for d in shape.dims if d.name in names]


class PerShard(GradientOperation):
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
        PendingSums.want(grads, False, [d.name for d in axes.shard_dims], strategy)
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
                self._check_foreseen(lowering, grad, axes)
        shapes = [mesh_impl.slice_shape(output.shape) for output in self.outputs]
        self.set_outputs(lowering, [reshaped(mesh_impl, *x) for x in zip(terms, shapes)])

    def _check_foreseen(
        self, lowering: mtf.Lowering, grad: mtf.Tensor, replica_axes: set[int]
    ) -> None:
        """Raises ValueError if an operation before a gradient summed over shards unexpectedly.

        `replica_axes` are the mesh axes along which the gradient is split by shard.
        """
        operation = PendingSums.of_lowering(lowering).mixed(grad, replica_axes)
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
        """Adds the operation.

        `sum_dims` has the dims of each gradient to sum over; gradients without such dims are
        pending. `batch_dims` are the names of the dimensions that split the batch; if None, they
        are found in the graph.
        """
        self._sum_dims = [list(dims) for dims in sum_dims]
        self._strategy = strategy
        plain = [g for g, dims in zip(grads, self._sum_dims) if not dims]
        PendingSums.want(plain, True, batch_dims, strategy)
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
    (of a penalty on weights) is divided equally among the shards. A gradient that is split over a
    replica axis by its own layout (an expert's) gets no shard dim for that axis: each shard holds
    its own part already.

    Args:
      grads: pending or reduced gradients of shapes `var dims`; None and gradients with shard dims
        pass through.
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
        check_recoverable(
            [None if g is None or shard_dims_in(g.shape, axes) else g for g in grads], axes
        )
    return split_into_shards(grads, axes, strategy, accept_summed)


def split_into_shards(
    grads: MaybeGradients, axes: ReplicaAxes, strategy: Strategy, accept_summed: bool
) -> list[mtf.Tensor | None]:
    """Does what `per_shard` does, for gradients that were checked before."""
    pending = [None if g is None or shard_dims_in(g.shape, axes) else g for g in grads]

    def make(present: list[mtf.Tensor]) -> Sequence[mtf.Tensor]:
        if accept_summed:
            check_batch_dims(present, axes)
        return PerShard(present, axes, strategy, accept_summed).outputs

    return [new if new is not None else old for new, old in zip(on_present(pending, make), grads)]


def sum_shards(
    grads: MaybeGradients, axes: ReplicaAxes | None = None, reducer: Strategy | None = None
) -> list[mtf.Tensor | None]:
    """Reduces gradients over the shards and all other mesh axes that they are pending over.

    All gradients of a mesh are reduced together. The program's own assignments (`mtf.assign`, an
    optimizer without a wrapper) wait for the sums that were made before them and for the reads of
    all variables, so that no variable is written before all have been read.

    Args:
      grads: gradients of shape `[shard dims...] + var dims`, which are summed over the shard dims,
        or of shape `var dims`, which are reduced if they are pending; None passes through.
      axes: the replica axes; None when no gradient has shard dims.
      reducer: the reduction strategy; None takes `FusedAllReduce()`. A strategy that compresses an
        optimizer's gradients, such as `QuantizedAllReduce`, does not compress here, and warns.

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

    return on_present(grads, make)


def sum_gradients(
    grads: Sequence[mtf.Tensor],
    sum_dims: Sequence[Sequence[mtf.Dimension]],
    strategy: Strategy,
    batch_dims: Sequence[str] | None = None,
) -> list[mtf.Tensor]:
    """Reduces gradients of one or several meshes; those of a mesh are reduced together.

    `sum_dims` and `batch_dims` are as for `SumGradients`.
    """

    def of_mesh(mesh: mtf.Mesh, some: list[int]) -> Sequence[mtf.Tensor]:
        del mesh
        dims = [sum_dims[i] for i in some]
        return SumGradients([grads[i] for i in some], dims, strategy, batch_dims).outputs

    return by_key([g.mesh for g in grads], of_mesh)
