"""Partial sums of lowered tensors: finds, divides and reduces them."""

from __future__ import annotations

from typing import Any, Collection, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.reduce import Strategy


class PartialSum(NamedTuple):
    """A lowered tensor and the mesh axes that it has not been summed over yet.

    Attributes:
      value: a `LaidOutTensor`; each processor's slice is its part of the sum.
      mesh_axes: sorted indices of mesh axes; empty once the sum is reduced.
    """

    value: Any
    mesh_axes: tuple[int, ...]


def partial_sum(lowering: mtf.Lowering, tensor: mtf.Tensor) -> PartialSum:
    """Returns the partial sums behind a tensor, even if it was reduced for another reader."""
    lowered = lowering.tensors[tensor]
    # LazyAllreduceSum is what Mesh-TF 0.1.21 gives a reduction over a split dimension; the name
    # is exported by mesh_tensorflow.
    if isinstance(lowered, mtf.LazyAllreduceSum):
        value = lowered.laid_out_input.to_laid_out_tensor()
        return PartialSum(value, tuple(sorted(lowered.mesh_axes)))
    return PartialSum(lowered.to_laid_out_tensor(), ())


def reduce_partial_sums(
    mesh_impl: Any, sums: Sequence[PartialSum], strategy: Strategy
) -> list[Any]:
    """Reduces partial sums over their mesh axes; those with the same axes together.

    Args:
      mesh_impl: the mesh that the sums lie on.
      sums: the partial sums.
      strategy: the reduction strategy.

    Returns:
      A `LaidOutTensor` for each sum, in order.
    """
    results = [s.value for s in sums]
    by_axes: dict[tuple[int, ...], list[int]] = {}
    for index, s in enumerate(sums):
        if s.mesh_axes:
            by_axes.setdefault(s.mesh_axes, []).append(index)
    for mesh_axes, indices in by_axes.items():
        groups = ProcessorGroups.along(mesh_impl, mesh_axes)
        summed = strategy.all_reduce(mesh_impl, [results[i] for i in indices], groups)
        for index, value in zip(indices, summed):
            results[index] = value
    return results


def share(mesh_impl: Any, value: Any, mesh_axes: Collection[int]) -> Any:
    """Divides a tensor that processors along mesh axes hold alike into equal shares.

    Args:
      mesh_impl: the mesh.
      value: a `LaidOutTensor`.
      mesh_axes: the mesh axes.

    Returns:
      A `LaidOutTensor` of shares, which add up to the tensor along the mesh axes.
    """
    count = mtf.Shape([mesh_impl.shape.dims[axis] for axis in mesh_axes]).size
    if count == 1:
        return value
    return mesh_impl.slicewise(lambda x: x / tf.cast(count, x.dtype), value)
