"""Checks whether a function of TensorFlow tensors is linear in its arguments."""

from __future__ import annotations

import enum
import logging
from typing import Any, Callable, Sequence

import numpy as np

from mtf_gradsync._private.libraries import tf
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
    """A tensor's dependence on the arguments: none (it is a factor), linear, or it is zero."""

    SHARED = enum.auto()
    LINEAR = enum.auto()
    ZERO = enum.auto()  # both of the others


def linear_arguments(
    fn: Callable[..., Any],
    specs: Sequence[tuple[Sequence[int], tf.DType]],
    arguments: Sequence[int],
) -> bool:
    """Returns whether a function is known to be jointly linear in some of its arguments.

    The function takes tf tensors of the shapes and dtypes in `specs`; `arguments` has the positions
    of the arguments in question. The function is called once, in a graph of its own. The check
    knows only TensorFlow's simplest operations, so that it returns False for some linear functions.
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
    """Returns how an operation's results depend on the arguments; None if that is not known."""
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
