"""Compares values of a division with the reference: errors, factors, and expected rounding."""

from __future__ import annotations

from typing import Mapping, NamedTuple, Sequence

import numpy as np

Values = Mapping[str, np.ndarray]

# The error by rounding of a float32 sum of some hundred terms, in another order.
LEAST = 64 * float(np.finfo(np.float32).eps)
# The error by rounding of one float32 number, and the share of a change that must be right.
ROUNDED, LITTLE = 16 * float(np.finfo(np.float32).eps), 0.01
# By how much a division's rounding error may exceed the reference's. A division sums in another
# order, and the largest error of many variables is several times the typical error.
_SPREAD = 8.0
# One rounding to bfloat16, which has eight bits, is up to 2**-9 of a number, and sums have several.
BFLOAT16 = 2.0**-7
# The error by rounding of a float64 sum in another order. If another order of the examples changes
# gradients by more, the model depends on the order.
ORDER = 1e-7
# The largest error that rounding explains if the program does not run in float64.
MOST_ROUNDED = 1e-3


class Difference(NamedTuple):
    """The difference of a variable's value from the reference's.

    Attributes:
      variable: the variable's name.
      error: the largest difference, divided by the largest number of the reference.
      expected: the largest error that rounding explains.
      factor: the number by which the reference's value has to be multiplied to give the
        division's; None if there is no such number, or if nothing differs.
    """

    variable: str
    error: float
    expected: float
    factor: float | None = None

    @property
    def is_equal(self) -> bool:
        """Whether rounding explains the difference. It never explains a NaN."""
        return self.error <= self.expected


def is_finite(value: np.ndarray) -> bool:
    """Returns whether all numbers of an array are finite; True for arrays of text."""
    return (
        bool(np.isfinite(np.asarray(value, np.float64)).all()) if value.dtype.kind != "S" else True
    )


def error_of(value: np.ndarray, reference: np.ndarray) -> float:
    """Returns the largest difference of two arrays, divided by the largest number of `reference`.

    The result is called the error of `value`. The error is infinite if the two arrays have
    different shapes. It is also infinite if they differ in an element that is not finite in one of
    them.
    """
    if value.shape != reference.shape:
        return float("inf")
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    same = (value == reference) | (np.isnan(value) & np.isnan(reference))
    if same.all():
        return 0.0
    scale = float(np.max(np.abs(reference), initial=0.0))
    largest = float(np.max(np.abs(value - reference)))
    error = largest / scale if scale else float("inf")
    return float("inf") if np.isnan(error) else error


def factor_of(value: np.ndarray, reference: np.ndarray, expected: float) -> float | None:
    """Returns the number f for which `value` is f * `reference`, or None if there is none.

    `value` and f * `reference` may differ by an error of at most `expected`, or of 1e-4 if that is
    larger. This error is the largest difference divided by the largest number, as `error_of`
    returns it. If all numbers of `value` are 0, the result is 0.

    Examples:
      >>> factor_of(np.array([2.0, 4.0]), np.array([1.0, 2.0]), 1e-6)
      2.0
    """
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
    """Returns the differences of variables from the reference, one for each name in `order`.

    Args:
      values: a dictionary from the names of variables to their values (or their gradients) in a
        division.
      reference: the same for the reference.
      order: the names to compare. A name that `values` or `reference` lacks has an infinite error.
      expected: a dictionary from names to the largest errors that rounding explains. For a name
        that is not in it, this error is `LEAST`.

    Returns:
      The differences, in the order of `order`.
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


def expected_errors(reference: Values, others: Sequence[Values]) -> dict[str, float]:
    """Returns a dictionary from each variable's name to the largest error that rounding explains.

    Each dictionary in `others` has values of the same variables as `reference`, but computed in
    float64 or from the examples in another order. For each variable, the result has eight times the
    largest error (see `error_of`) between its value in `reference` and a value in `others`. It is
    at least `LEAST`.
    """
    return {
        name: max(
            [LEAST, *(_SPREAD * error_of(value, other[name]) for other in others if name in other)]
        )
        for name, value in reference.items()
    }
