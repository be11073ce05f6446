"""Partial sums while a graph is lowered: the one place that opens pending gradients."""

from __future__ import annotations

import collections
import functools
from typing import Any, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.reduce import ProcessorGroups, Strategy


class PartialSum(NamedTuple):
    """A lowered tensor and the mesh axes that it has not been summed over yet.

    Attributes:
      value: a `LaidOutTensor`; each processor's slice is its share of the sum.
      mesh_axes: sorted indices of mesh axes; empty once the sum is whole.
    """

    value: Any
    mesh_axes: tuple[int, ...]


def partial_sum(lowering: mtf.Lowering, tensor: mtf.Tensor) -> PartialSum:
    """The partial sums behind a tensor, whether or not its all-reduce has run.

    A tensor whose all-reduce already ran for another reader still has its partial sums.
    """
    lowered = lowering.tensors[tensor]
    # LazyAllreduceSum is what Mesh-TF 0.1.21 gives a reduction over a split dimension; the name
    # is exported by mesh_tensorflow.
    if isinstance(lowered, mtf.LazyAllreduceSum):
        value = lowered.laid_out_input.to_laid_out_tensor()
        return PartialSum(value, tuple(sorted(lowered.mesh_axes)))
    return PartialSum(lowered.to_laid_out_tensor(), ())


# What these make of a sum is the sum of what they make of its parts, but Mesh-TF 0.1.21 runs the
# all-reduce before them. The gradient of a slice (of a table of positions) is a pad.
_LINEAR = (mtf.PadOperation, mtf.SliceOperation)


def keep_pending(tensors: Sequence[mtf.Tensor]) -> None:
    """Lets pending sums stay pending through linear operations right before these tensors."""
    for tensor in tensors:
        operation = tensor.operation
        while isinstance(operation, _LINEAR):
            if "lower" not in vars(operation):
                operation.lower = functools.partial(_lower_pending, operation)
            operation = operation.inputs[0].operation


def _lower_pending(operation: mtf.Operation, lowering: mtf.Lowering) -> None:
    """Lowers a linear operation on the partial sums of its input, if that is pending."""
    (source,), (output,) = operation.inputs, operation.outputs
    lowered = lowering.tensors[source]
    lower = type(operation).lower
    if not isinstance(lowered, mtf.LazyAllreduceSum) or _already_reduced(lowering, source):
        lower(operation, lowering)
        return
    lowering.tensors[source] = lowered.laid_out_input
    lower(operation, lowering)
    lowering.tensors[source] = lowered
    parts = lowering.tensors[output].to_laid_out_tensor()
    lowering.tensors[output] = mtf.LazyAllreduceSum(
        lowered.mesh_impl, parts, lowered.mesh_axes, lowered.add_counter_fn
    )


def _already_reduced(lowering: mtf.Lowering, tensor: mtf.Tensor) -> bool:
    lowered = lowering.tensors[tensor]
    # Read on 0.1.21: LazyAllreduceSum caches the sum in _reduced.
    return getattr(lowered, "_reduced", None) is not None


def reduce_partial_sums(mesh_impl: Any, sums: Sequence[PartialSum], reducer: Strategy) -> list[Any]:
    """Sums over the remaining mesh axes; sums with the same axes cross the mesh together.

    Args:
      mesh_impl: the mesh that the sums lie on.
      sums: what to reduce.
      reducer: how.

    Returns:
      A `LaidOutTensor` for each sum, in order.
    """
    results = [s.value for s in sums]
    by_axes = collections.OrderedDict()
    for index, s in enumerate(sums):
        if s.mesh_axes:
            by_axes.setdefault(s.mesh_axes, []).append(index)
    for mesh_axes, indices in by_axes.items():
        groups = ProcessorGroups.along(mesh_impl, mesh_axes)
        reduced = reducer.all_reduce(mesh_impl, [results[i] for i in indices], groups)
        for index, value in zip(indices, reduced):
            results[index] = value
    return results


def whole_values(
    lowering: mtf.Lowering, tensors: Sequence[mtf.Tensor], reducer: Strategy
) -> list[Any]:
    """The lowered values of tensors, each summed over all of its pending axes.

    What is reduced here is kept in the lowering, so that no later reader reduces it again.
    """
    results: list[Any] = [None] * len(tensors)
    pending = []
    for index, tensor in enumerate(tensors):
        lowered = lowering.tensors[tensor]
        if isinstance(lowered, mtf.LazyAllreduceSum) and not _already_reduced(lowering, tensor):
            pending.append(index)
        else:
            results[index] = lowered.to_laid_out_tensor()
    if pending:
        mesh_impl = lowering.mesh_impl(tensors[pending[0]])
        sums = [partial_sum(lowering, tensors[i]) for i in pending]
        for index, value in zip(pending, reduce_partial_sums(mesh_impl, sums, reducer)):
            lowered = lowering.tensors[tensors[index]]
            lowered._reduced = value  # what its own all-reduce would have cached
            if lowered.add_counter_fn:
                lowered.add_counter_fn()
            results[index] = value
    return results


class StageOperation(mtf.Operation):
    """Base of this package's operations on lists of tensors.

    Subclasses give the shapes of their outputs and lower all of them at once.
    """

    def __init__(
        self,
        inputs: Sequence[mtf.Tensor],
        shapes: Sequence[mtf.Shape],
        name: str,
        dtypes: Any = None,
    ):
        super().__init__(list(inputs), name=name)
        dtypes = dtypes or [x.dtype for x in inputs]
        self._outputs = [
            mtf.Tensor(self, shape, dtype, index=index)
            for index, (shape, dtype) in enumerate(zip(shapes, dtypes))
        ]
        # Mesh-TF's automatic layout asks for it once inputs and outputs are known.
        self._splittable_dims, self._unsplittable_dims = (
            self._initialize_all_dimensions_as_splittable()
        )

    def set_outputs(self, lowering: mtf.Lowering, values: Sequence[Any]) -> None:
        """Records the lowered outputs, in order."""
        for output, value in zip(self.outputs, values):
            lowering.set_tensor_lowering(output, value)
