"""Finds the inputs that an operation is linear in.

A linear operation can run on each term of a sum before the terms are added up, if its other inputs
are the same for all terms.
"""

from __future__ import annotations

from typing import Collection

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import output_gradients, reduction, slice_function
from mtf_gradsync.gradients.pending.functions import linear_arguments

# Linear in all of their inputs together: each output is a sum of terms of one input each.
_JOINTLY = (
    mtf.AddOperation,
    mtf.BroadcastOperation,
    mtf.ConcatOperation,
    mtf.Depend,
    mtf.PadOperation,
    mtf.ReshapeOperation,
    mtf.ScalarAddOperation,  # what it adds is divided among the terms
    mtf.ScalarMultiplyOperation,
    mtf.ShiftOperation,
    mtf.SliceOperation,
    mtf.SplitOperation,
    mtf.StackOperation,
    mtf.UnstackOperation,
)
# Products: linear in each of their inputs while the others are factors.
_IN_EACH = (
    mtf.EinsumOperation,
    mtf.Conv2dOperation,
    mtf.Conv3dOperation,
    mtf.Conv2dTransposeOperation,
    mtf.Conv3dTransposeOperation,
    mtf.Conv2or3dBackpropInputOperation,
    mtf.Conv2or3dBackpropFilterOperation,
)
# Their outputs are the same lowered objects as their inputs, pending or not.
_PASSES_ON = (mtf.StopGradient, mtf.CustomGradientOperation)


def passes_on(operation: mtf.Operation) -> bool:
    """Whether an operation's lowered outputs are its lowered inputs."""
    return isinstance(operation, _PASSES_ON)


def is_product_or_sum(operation: mtf.Operation) -> bool:
    """Whether an operation sums over the dimensions that its outputs lack."""
    if isinstance(operation, mtf.ReduceOperation):
        return reduction(operation) == "SUM"
    return isinstance(operation, _IN_EACH)


def runs_on_slices(operation: mtf.Operation) -> bool:
    """Whether an operation runs on each processor's slices, without communication."""
    return isinstance(
        operation,
        (mtf.SlicewiseOperation, mtf.GenericGradOperation, mtf.BinaryOpWithBroadcasting),
    )


def sums_before_broadcast(operation: mtf.Operation) -> mtf.Shape | None:
    """Returns the shape of an einsum's sum if that is broadcast to dimensions that no input has."""
    if not isinstance(operation, mtf.EinsumOperation):
        return None
    known = {d for t in operation.inputs for d in t.shape.dims}
    (output,) = operation.outputs
    kept = [d for d in output.shape.dims if d in known]
    return mtf.Shape(kept) if kept != output.shape.dims else None


def linear_positions(operation: mtf.Operation, pending: Collection[int]) -> tuple[int, ...] | None:
    """Returns positions of inputs, pending ones included, that an operation is linear in together.

    It is None if the operation is not known to be linear in the pending inputs. At least one input
    is pending.
    """
    inputs = operation.inputs
    if isinstance(operation, _IN_EACH):
        return tuple(pending) if len(pending) == 1 else None
    if isinstance(operation, mtf.GenericGradOperation):
        found = range(len(inputs))[-len(output_gradients(operation)) :]
    elif isinstance(operation, mtf.ReduceOperation):
        found = range(1 if reduction(operation) == "SUM" else 0)
    elif isinstance(operation, mtf.PoolBackPropOperation):
        found = range(2, 3)
    elif isinstance(operation, _JOINTLY):
        found = range(len(inputs))
    elif isinstance(operation, (mtf.SlicewiseOperation, mtf.BinaryOpWithBroadcasting)):
        return _of_function(operation, pending)
    else:
        return None
    return tuple(found) if set(found).issuperset(pending) else None


def _of_function(operation: mtf.Operation, pending: Collection[int]) -> tuple[int, ...] | None:
    shapes = [x.shape for x in operation.inputs]
    if isinstance(operation, mtf.BinaryOpWithBroadcasting):
        # The function gets slices that were broadcast to the output's shape.
        shapes = [operation.outputs[0].shape] * 2
    specs = [(s.to_integer_list, x.dtype) for s, x in zip(shapes, operation.inputs)]
    floating = [i for i, x in enumerate(operation.inputs) if x.dtype.is_floating]
    # The fewest inputs first: the others may be factors.
    for found in (tuple(sorted(pending)), tuple(floating)):
        if set(found).issuperset(pending) and linear_arguments(
            slice_function(operation), specs, found
        ):
            return found
    return None
