"""Partial sums of lowered tensors: finds, divides and reduces them."""

from __future__ import annotations

from typing import Any, Callable, Collection, Hashable, NamedTuple, Sequence, TypeVar

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.reduce.parts import Cuts, take_parts
from mtf_gradsync.reduce.strategy import reduce_scatter_by

_K = TypeVar("_K", bound=Hashable)


class PartialSum(NamedTuple):
    """A lowered tensor and the mesh axes that it has not been summed over yet.

    Attributes:
      value: a `LaidOutTensor`; each processor's slice is its part of the sum.
      mesh_axes: sorted indices of mesh axes; empty once the sum is reduced.
    """

    value: Any
    mesh_axes: tuple[int, ...]


def partial_sum(
    lowering: mtf.Lowering,
    tensor: mtf.Tensor,
    dims: Sequence[mtf.Dimension] = (),
    reduced: bool = False,
) -> PartialSum:
    """Returns the partial sums behind a tensor, even if it was reduced for another reader.

    Each processor also sums its own slice over `dims`, which the value then lacks; mesh axes that
    split them are still to be summed over. With `reduced`, the sum behind the tensor itself is
    reduced first, so that only sums over `dims` are left.
    """
    lowered = lowering.tensors[tensor]
    # LazyAllreduceSum is what Mesh-TF 0.1.21 gives a reduction over a split dimension; the name
    # is exported by mesh_tensorflow.
    if isinstance(lowered, mtf.LazyAllreduceSum) and not reduced:
        value, mesh_axes = lowered.laid_out_input.to_laid_out_tensor(), set(lowered.mesh_axes)
    else:
        value, mesh_axes = lowered.to_laid_out_tensor(), set()
    if dims:
        mesh_impl = lowering.mesh_impl(tensor)
        layout = mesh_impl.tensor_layout(tensor.shape)
        slice_shape = mesh_impl.slice_shape(tensor.shape)
        positions = [i for i, d in enumerate(tensor.shape.dims) if d in dims]
        mesh_axes |= {layout[i] for i in positions} - {None}
        if all(slice_shape[i] == 1 for i in positions):
            rest = [size for i, size in enumerate(slice_shape) if i not in positions]
            value = mesh_impl.slicewise(lambda x: tf.reshape(x, rest), value)
        else:
            value = mesh_impl.slicewise(lambda x: tf.reduce_sum(x, positions), value)
    return PartialSum(value, tuple(sorted(mesh_axes)))


def reduce_partial_sums(
    mesh_impl: Any,
    sums: Sequence[PartialSum],
    strategy: Strategy,
    cuts: Sequence[Cuts] | None = None,
) -> list[Any]:
    """Reduces partial sums over their mesh axes, those with the same axes together.

    Returns a `LaidOutTensor` for each, in order. With `cuts`, which say how each sum is cut, each
    processor gets its part of the sum, and the whole sum without.
    """
    cuts = [()] * len(sums) if cuts is None else cuts
    # Along the other mesh axes processors hold the same sum already.
    sent = [tuple(c for c in cut if c.mesh_axis in s.mesh_axes) for s, cut in zip(sums, cuts)]

    def reduce(key: tuple[tuple[int, ...], bool], indices: list[int]) -> list[Any]:
        mesh_axes, is_cut = key
        values = [sums[i].value for i in indices]
        if not mesh_axes:
            return values
        groups = ProcessorGroups.along(mesh_impl, mesh_axes)
        if not is_cut:
            return strategy.all_reduce(mesh_impl, values, groups)
        return reduce_scatter_by(strategy, mesh_impl, values, groups, [sent[i] for i in indices])

    keys = [(s.mesh_axes, bool(some)) for s, some in zip(sums, sent)]
    return [
        take_parts(mesh_impl, result, [c for c in cut if c not in some])
        for result, cut, some in zip(by_key(keys, reduce), cuts, sent)
    ]


def by_key(keys: Sequence[_K], make: Callable[[_K, list[int]], Sequence[Any]]) -> list[Any]:
    """Calls `make` once for each different key, and returns a result for each position in `keys`.

    `make` gets a key and all positions that have it, and returns a result for each of them.
    """
    positions: dict[_K, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(key, []).append(position)
    results: dict[int, Any] = {}
    for key, some in positions.items():
        results.update(zip(some, make(key, some)))
    return [results[position] for position in range(len(keys))]


def terms_of_processors(
    lowering: mtf.Lowering,
    grads: Sequence[mtf.Tensor],
    sum_dims: Sequence[Sequence[mtf.Dimension]],
    replica_axes: Sequence[Collection[int]],
    strategy: Strategy,
) -> list[Any]:
    """Returns each processor's terms of gradients, whose sums over replica axes are the gradients.

    Gradients are pending, reduced or per shard. For each, `sum_dims` has the dims to sum over, and
    `replica_axes` the mesh axes along which processors keep terms of their own; the strategy
    reduces over all others.
    """
    mesh_impl = lowering.mesh_impl(grads[0])
    sums = [partial_sum(lowering, grad, dims) for grad, dims in zip(grads, sum_dims)]
    others = [
        PartialSum(s.value, tuple(axis for axis in s.mesh_axes if axis not in axes))
        for s, axes in zip(sums, replica_axes)
    ]
    values = reduce_partial_sums(mesh_impl, others, strategy)
    # Along an axis where a gradient is reduced already every processor takes an equal share, so
    # that the sum over the axis is the gradient.
    return [
        share(mesh_impl, value, set(axes).difference(s.mesh_axes))
        for value, s, axes in zip(values, sums, replica_axes)
    ]


def share(mesh_impl: Any, value: Any, mesh_axes: Collection[int]) -> Any:
    """Divides a tensor by the number of processors that hold it along mesh axes.

    The sum of these equal shares over the axes is the tensor.
    """
    count = mtf.Shape([mesh_impl.shape.dims[axis] for axis in mesh_axes]).size
    if count == 1:
        return value
    return mesh_impl.slicewise(lambda x: x / tf.cast(count, x.dtype), value)
