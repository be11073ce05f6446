"""Gradients on their way over the mesh: pending, per shard, summed."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.partial_sums import (
    PartialSum,
    StageOperation,
    keep_pending,
    partial_sum,
    reduce_partial_sums,
    whole_values,
)
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.reduce import FusedAllReduce, Strategy, check_strategy

MaybeGradients = Sequence[Optional[mtf.Tensor]]


def check_gradients(grads: MaybeGradients) -> list[mtf.Tensor | None]:
    """Returns grads as a new list.

    Raises:
      TypeError: something in it is neither an mtf tensor nor None.
    """
    if isinstance(grads, mtf.Tensor) or not hasattr(grads, "__iter__"):
        raise TypeError(f"grads must be a list of mtf.Tensor or None, got {grads!r}.")
    grads = list(grads)
    for index, grad in enumerate(grads):
        if grad is not None and not isinstance(grad, mtf.Tensor):
            raise TypeError(f"grads must hold mtf.Tensor or None, but grads[{index}] is {grad!r}.")
    return grads


def on_present(
    grads: MaybeGradients, make: Callable[[list[mtf.Tensor]], Sequence[mtf.Tensor]]
) -> list[mtf.Tensor | None]:
    """Applies `make` to the gradients that are not None and puts the Nones back."""
    present = [g for g in grads if g is not None]
    if not present:
        return list(grads)
    made = iter(make(present))
    return [None if g is None else next(made) for g in grads]


def shard_dims_in(shape: mtf.Shape, axes: ReplicaAxes) -> list[mtf.Dimension]:
    """The dimensions of a shape that carry the names of shard dims."""
    names = {d.name for d in axes.shard_dims}
    return [d for d in shape.dims if d.name in names]


class PerShard(StageOperation):
    """Gradients of the variables' shapes -> one per shard, without communication."""

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        axes: ReplicaAxes,
        reducer: Strategy,
        on_summed: Callable[[list[int]], None] | None = None,
    ):
        self._axes = axes
        self._reducer = reducer
        self._on_summed = on_summed
        keep_pending(grads)
        shapes = [mtf.Shape([*axes.free_shard_dims(g.shape), *g.shape.dims]) for g in grads]
        super().__init__(grads, shapes, name="per_shard")

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        self._axes.check_mesh_impl(mesh_impl)
        axis_of = dict(zip(self._axes.shard_dims, self._axes.mesh_axes))
        sums, shares = [], []
        for grad in self.inputs:
            replica_axes = {axis_of[d] for d in self._axes.free_shard_dims(grad.shape)}
            value, mesh_axes = partial_sum(lowering, grad)
            # Along an axis where the gradient is summed already, every shard takes an equal
            # share of it, so that the sum over the shard dims stays the same gradient.
            shared = replica_axes.difference(mesh_axes)
            shares.append(mtf.Shape([mesh_impl.shape[axis] for axis in sorted(shared)]).size)
            # Axes beyond the replica axes are no business of the shards: sum them now.
            sums.append(PartialSum(value, tuple(a for a in mesh_axes if a not in replica_axes)))
        summed = [index for index, share in enumerate(shares) if share > 1]
        if summed and self._on_summed is not None:
            self._on_summed(summed)
        values = reduce_partial_sums(mesh_impl, sums, self._reducer)
        outputs = []
        for value, share, output in zip(values, shares, self.outputs):
            slice_shape = mesh_impl.slice_shape(output.shape)

            def to_shard(x: tf.Tensor, share: int = share, slice_shape: Any = slice_shape):
                if share > 1:
                    x = x / tf.cast(share, x.dtype)
                return tf.reshape(x, slice_shape)

            outputs.append(mesh_impl.slicewise(to_shard, value))
        self.set_outputs(lowering, outputs)


class SumGradients(StageOperation):
    """Pending and per-shard gradients -> whole ones; all of them cross the mesh together."""

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        sum_dims: Sequence[Sequence[mtf.Dimension]],
        reducer: Strategy,
    ):
        self._sum_dims = [list(dims) for dims in sum_dims]
        keep_pending(grads)
        self._reducer = reducer
        shapes = [
            mtf.Shape([d for d in g.shape.dims if d not in dims])
            for g, dims in zip(grads, self._sum_dims)
        ]
        super().__init__(grads, shapes, name="sum_gradients")

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        plain = [i for i, dims in enumerate(self._sum_dims) if not dims]
        results: list[Any] = [None] * len(self.inputs)
        sums, where = [], []
        for index, (grad, dims) in enumerate(zip(self.inputs, self._sum_dims)):
            if not dims:
                continue
            value, pending_axes = partial_sum(lowering, grad)
            value, summed_axes = local_sum(mesh_impl, value, grad.shape, dims)
            mesh_axes = tuple(sorted(set(pending_axes) | set(summed_axes)))
            sums.append(PartialSum(value, mesh_axes))
            where.append(index)
        for index, value in zip(where, reduce_partial_sums(mesh_impl, sums, self._reducer)):
            results[index] = value
        whole = whole_values(lowering, [self.inputs[i] for i in plain], self._reducer)
        for index, value in zip(plain, whole):
            results[index] = value
        self.set_outputs(lowering, results)


def local_sum(mesh_impl: Any, value: Any, shape: mtf.Shape, dims: Sequence[mtf.Dimension]) -> Any:
    """Sums each processor's slice over dims.

    Args:
      mesh_impl: the mesh.
      value: `LaidOutTensor` of a tensor of shape `shape`.
      shape: `mtf.Shape`.
      dims: dimensions of `shape` to sum away.

    Returns:
      The `LaidOutTensor` without `dims`, and the mesh axes that it still has to be summed over.
    """
    layout = mesh_impl.tensor_layout(shape)
    positions = [i for i, d in enumerate(shape.dims) if d in dims]
    mesh_axes = [layout[i] for i in positions if layout[i] is not None]
    slice_shape = mesh_impl.slice_shape(shape)
    if all(slice_shape[i] == 1 for i in positions):
        rest = [size for i, size in enumerate(slice_shape) if i not in positions]
        return mesh_impl.slicewise(lambda x: tf.reshape(x, rest), value), mesh_axes
    return mesh_impl.slicewise(lambda x: tf.reduce_sum(x, positions), value), mesh_axes


def per_shard(
    grads: MaybeGradients,
    axes: ReplicaAxes,
    reducer: Strategy | None = None,
    on_summed: Callable[[list[int]], None] | None = None,
) -> list[mtf.Tensor | None]:
    """Turns gradients into one gradient per shard; nothing crosses the replica axes.

    Each processor keeps the partial sum that it has. A gradient that was summed over a replica
    axis before (it was cast, clipped, or made without the batch) is shared equally among the
    shards along that axis. A gradient that is split over a replica axis by its own layout (an
    expert's) gets no shard dim for that axis: each shard holds its own part already.

    Args:
      grads: gradients of shapes `var dims`, pending or not; None passes through; a gradient
        that has shard dims already is left as it is.
      axes: the replica axes.
      reducer: how sums over mesh axes other than the replica axes are made, where a gradient is
        pending over such axes; None takes `FusedAllReduce()`.
      on_summed: called when the graph is lowered, if there are gradients that were summed over a
        replica axis before, with their positions in grads.

    Returns:
      A list of tensors of shape `[shard dims...] + var dims`, in the dtypes of the gradients;
      their sum over the shard dims is the gradient.

    Raises:
      TypeError: grads or axes are of the wrong type.
    """
    grads = check_gradients(grads)
    check_axes(axes)
    reducer = check_strategy(FusedAllReduce() if reducer is None else reducer)
    pending = [None if g is None or shard_dims_in(g.shape, axes) else g for g in grads]
    where = [index for index, g in enumerate(pending) if g is not None]

    def say(summed: list[int]) -> None:
        if on_summed is not None:
            on_summed([where[index] for index in summed])

    made = on_present(pending, lambda present: PerShard(present, axes, reducer, say).outputs)
    return [new if new is not None else old for new, old in zip(made, grads)]


def sum_shards(
    grads: MaybeGradients, axes: ReplicaAxes | None = None, reducer: Strategy | None = None
) -> list[mtf.Tensor | None]:
    """Sums gradients over the shards and over every mesh axis that is still pending.

    Args:
      grads: gradients of shape `[shard dims...] + var dims` (the shard dims are summed away) or
        `var dims` (the pending all-reduce runs); None passes through.
      axes: the replica axes; None when no gradient has shard dims.
      reducer: how sums cross the mesh; None takes `FusedAllReduce()`.

    Returns:
      A list of tensors of shape `var dims`, whole on every processor.

    Raises:
      TypeError: grads, axes or reducer are of the wrong type.
    """
    grads = check_gradients(grads)
    if axes is not None:
        check_axes(axes)
    reducer = check_strategy(FusedAllReduce() if reducer is None else reducer)

    def make(present: list[mtf.Tensor]) -> Sequence[mtf.Tensor]:
        sum_dims = [[] if axes is None else shard_dims_in(g.shape, axes) for g in present]
        return SumGradients(present, sum_dims, reducer).outputs

    return on_present(grads, make)


def check_axes(axes: Any) -> ReplicaAxes:
    """Returns axes, or raises TypeError if they are no ReplicaAxes."""
    if not isinstance(axes, ReplicaAxes):
        raise TypeError(
            "axes must be a ReplicaAxes, such as ReplicaAxes('batch:4;model:2', 'batch:batch'), "
            f"got {axes!r}."
        )
    return axes
