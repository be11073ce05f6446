"""Checks whether a function of TensorFlow tensors is linear in its arguments."""

from __future__ import annotations

import enum
import logging
from typing import Any, Callable, Collection, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import output_gradients, reduction, slice_function
from mtf_gradsync._private.tensorflow import trace_function

_logger = logging.getLogger("mtf_gradsync")

# Linear in the first input; others are shapes, axes, divisors and the like.
_FIRST = frozenset({
    "BroadcastTo", "Cast", "Conj", "Cumsum", "Div", "DivNoNan", "ExpandDims", "GatherNd",
    "GatherV2", "Identity", "MatrixDiagV3", "Mean", "MirrorPad", "Neg", "Pad", "RealDiv", "Reshape",
    "ReverseV2", "Roll", "Slice", "Snapshot", "SplitV", "Squeeze", "StopGradient", "StridedSlice",
    "Sum", "Tile", "Transpose", "Unpack",
})  # fmt: skip
# The inputs that an operation is linear in together.
_TOGETHER = {
    **dict.fromkeys(_FIRST, slice(1)),
    "Split": slice(1, 2),
    **dict.fromkeys(("Add", "AddN", "AddV2", "Pack", "Sub"), slice(None)),
    "ConcatV2": slice(-1),  # the last is an axis
    **dict.fromkeys(("Select", "SelectV2"), slice(1, None)),
}
# Linear in each input by itself.
_PRODUCTS = frozenset({
    "BatchMatMul", "BatchMatMulV2", "Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput",
    "Conv3D", "Einsum", "MatMul", "Mul", "MulNoNan",
})  # fmt: skip
# Stateful for TensorFlow, but with the same result on all processors.
_REPEATABLE = frozenset({"ReadVariableOp", "VarHandleOp"})


class _Term(enum.Enum):
    """A tensor's dependence on the arguments: none (a shared factor), linear, or zero."""

    SHARED = enum.auto()
    LINEAR = enum.auto()
    ZERO = enum.auto()  # both of the others


def linear_arguments(
    fn: Callable[..., Any],
    specs: Sequence[tuple[Sequence[int], tf.DType]],
    arguments: Sequence[int],
) -> bool:
    """Returns whether a function is known to be linear in some arguments together.

    The function takes tf tensors of the shapes and dtypes in `specs`. It is run once, in a graph of
    its own. Only TensorFlow's simplest operations are followed, so that some linear functions are
    not recognised.
    """
    try:
        traced = trace_function(fn, [tf.TensorSpec(shape, dtype) for shape, dtype in specs])
    except Exception as error:  # a user's function, which may not run in another graph
        _logger.debug("%r could not be traced, and counts as not linear: %s", fn, error)
        return False
    terms: dict[str, _Term | None] = {
        x.name: _Term.LINEAR if i in arguments else _Term.SHARED
        for i, x in enumerate(traced.inputs)
    }
    terms.update((inner.name, _Term.SHARED) for _, inner in traced.captures)
    for op in traced.operations:
        if any(x.name in terms for x in op.outputs):
            continue
        term = _of(op, [terms.get(x.name) for x in op.inputs])
        terms.update((x.name, term) for x in op.outputs)
    return all(terms.get(x.name) in (_Term.LINEAR, _Term.ZERO) for x in traced.outputs)


def _of(op: tf.Operation, inputs: Sequence[_Term | None]) -> _Term | None:
    """Returns an operation's dependence on the arguments; None if it is not known."""
    if None in inputs or (op.op_def.is_stateful and op.type not in _REPEATABLE):
        return None  # each processor would draw random numbers of its own
    if op.type == "ZerosLike" or (
        op.type == "Const" and not np.any(tf.make_ndarray(op.get_attr("value")))
    ):
        return _Term.ZERO
    linear = [i for i, term in enumerate(inputs) if term is _Term.LINEAR]
    if not linear:
        return _Term.SHARED
    if op.type in _PRODUCTS:
        return _Term.LINEAR if len(linear) == 1 else None
    if op.type == "Cast" and not all(x.dtype.is_floating for x in (*op.inputs, *op.outputs)):
        return None
    together = range(len(inputs))[_TOGETHER.get(op.type, slice(0))]
    fits = set(linear).issubset(together) and all(inputs[i] is not _Term.SHARED for i in together)
    return _Term.LINEAR if fits else None


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
    """Returns whether an operation's lowered outputs are its lowered inputs."""
    return isinstance(operation, _PASSES_ON)


def is_product_or_sum(operation: mtf.Operation) -> bool:
    """Returns whether an operation sums over the dimensions that its outputs lack."""
    if isinstance(operation, mtf.ReduceOperation):
        return reduction(operation) == "SUM"
    return isinstance(operation, _IN_EACH)


def runs_on_slices(operation: mtf.Operation) -> bool:
    """Returns whether an operation runs on each processor's slices, without communication."""
    return isinstance(
        operation,
        (mtf.SlicewiseOperation, mtf.GenericGradOperation, mtf.BinaryOpWithBroadcasting),
    )


def sums_before_broadcast(operation: mtf.Operation) -> mtf.Shape | None:
    """Returns the shape of an einsum's sum, if it then broadcasts to new dimensions."""
    if not isinstance(operation, mtf.EinsumOperation):
        return None
    known = {d for t in operation.inputs for d in t.shape.dims}
    (output,) = operation.outputs
    kept = [d for d in output.shape.dims if d in known]
    return mtf.Shape(kept) if kept != output.shape.dims else None


def linear_positions(operation: mtf.Operation, pending: Collection[int]) -> tuple[int, ...] | None:
    """Returns the positions of inputs in which, together, an operation is linear.

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
