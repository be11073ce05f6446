"""Compares values of divisions: errors, factors, and the errors that rounding explains."""

from __future__ import annotations

from typing import Mapping, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.extension import mtf, tf, walk

Values = Mapping[str, np.ndarray]

EPSILON = float(np.finfo(np.float32).eps)
# Roundings of a float32 sum, of some hundred terms in another order.
LEAST = 64 * EPSILON
# How much more than the reference's own rounding error a division may have: it sums in another
# order, of which the largest error of many variables is some times the typical one.
_SPREAD = 8.0
# The distance of neighbouring numbers at 1, and how many roundings of activations a gradient has.
_PRECISION = {tf.bfloat16: 2.0**-7, tf.float16: 2.0**-10}
_ROUNDINGS = 32
# bfloat16 has eight bits: one rounding is up to 2**-9 of a number, and sums have several.
BFLOAT16 = 2.0**-7


class Difference(NamedTuple):
    """How far a variable's values are from the reference's.

    Attributes:
      variable: its name.
      error: the largest difference, over the largest number of the reference.
      expected: the error that rounding explains.
      factor: the number that makes one of the other; None where none does.
    """

    variable: str
    error: float
    expected: float
    factor: float | None = None

    @property
    def is_equal(self) -> bool:
        """Whether rounding explains it. A NaN is not explained."""
        return self.error <= self.expected


def error_of(value: np.ndarray, reference: np.ndarray) -> float:
    """Returns the largest difference, over the largest number of the reference."""
    if value.shape != reference.shape:
        return float("inf")
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    same = (value == reference) | (np.isnan(value) & np.isnan(reference))
    if same.all():
        return 0.0
    scale = float(np.max(np.abs(reference), initial=0.0))
    largest = float(np.max(np.abs(value - reference)))
    return largest / scale if scale else float("inf")


def factor_of(value: np.ndarray, reference: np.ndarray, expected: float) -> float | None:
    """Returns the number that the reference is multiplied by, or None if it is not one number."""
    if value.shape != reference.shape:
        return None
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    square = float(np.sum(reference * reference))
    if not square or not np.isfinite(value).all():
        return None
    factor = float(np.sum(value * reference)) / square
    if not factor:
        return 0.0 if not value.any() else None
    return factor if error_of(value / factor, reference) <= max(expected, 1e-4) else None


def compare(
    values: Values, reference: Values, order: Sequence[str], expected: Mapping[str, float]
) -> list[Difference]:
    """Compares variables, in the given order; one that only one has differs infinitely.

    `expected` is the error that rounding explains, by variable.
    """
    found = []
    for name in order:
        limit = expected.get(name, LEAST)
        if name not in values or name not in reference:
            found.append(Difference(name, float("inf"), limit))
            continue
        error = error_of(values[name], reference[name])
        factor = factor_of(values[name], reference[name], limit) if error > limit else None
        found.append(Difference(name, error, limit, factor))
    return found


def expected_errors(
    reference: Values, others: Sequence[Values], least: float = LEAST
) -> dict[str, float]:
    """Returns by variable the error that rounding explains.

    `others` are the same in float64, or with examples in other orders.
    """
    return {
        name: max(
            [least, *(_SPREAD * error_of(value, other[name]) for other in others if name in other)]
        )
        for name, value in reference.items()
    }


def least_error(losses: Sequence[mtf.Tensor]) -> float:
    """Returns the error that rounding explains of any gradient, by the narrowest dtype of a model.

    Products that a mesh splits have partial sums in the dtype of their activations, which other
    orders of the examples do not show.
    """
    dtypes = {x.dtype for op in behind(losses) for x in op.outputs if x.dtype.is_floating}
    narrow = [_PRECISION[dtype] for dtype in dtypes if dtype in _PRECISION]
    return max([LEAST, *(_ROUNDINGS * precision for precision in narrow)])


def behind(losses: Sequence[mtf.Tensor]) -> set[mtf.Operation]:
    """Returns the operations that losses are computed by."""
    return set(walk([x.operation for x in losses], lambda op: [x.operation for x in op.inputs]))


def exchanges_in_bfloat16(graph: tf.Graph) -> bool:
    """Returns whether a SIMD program sends float32 as bfloat16: Mesh-TF's all-to-all does."""
    return any(
        op.type == "AllToAll" and op.inputs[0].dtype == tf.bfloat16 for op in graph.get_operations()
    )
