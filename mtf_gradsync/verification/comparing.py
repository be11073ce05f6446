"""Compares what two divisions of a program have made: errors, factors, and what must differ."""

from __future__ import annotations

from typing import Mapping, NamedTuple, Sequence

import numpy as np

from mtf_gradsync._common import walk
from mtf_gradsync._private.libraries import mtf, tf

Values = Mapping[str, np.ndarray]

EPSILON = float(np.finfo(np.float32).eps)
# Roundings of a float32 sum, of some hundred terms in another order.
LEAST = 64 * EPSILON
# How much more than the reference's own rounding error a division may have: it sums in another
# order, of which the largest error of many variables is some times the typical one.
_SPREAD = 8.0
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


class Dependence(NamedTuple):
    """Something in a model that depends on how it is divided.

    Attributes:
      text: what it is, and what would do.
      by_steps: whether it depends only on which examples are in one step, and not on the mesh.
      is_random: whether it is random numbers.
    """

    text: str
    by_steps: bool = False
    is_random: bool = False


def dependences(losses: Sequence[mtf.Tensor], batch_dims: Sequence[str]) -> list[Dependence]:
    """Returns what in the models behind losses depends on how they are divided."""
    before = walk([x.operation for x in losses], lambda op: [x.operation for x in op.inputs])
    there = set(before)
    forward = [op for graph in {x.graph for x in losses} for op in graph.operations if op in there]
    found = []
    names = [op.name for op in forward if isinstance(op, mtf.ops.RandomOperation)]
    if names:
        found.append(
            Dependence(
                f"random numbers are drawn for each shard and microbatch ({_some(names)}); take "
                "them out by without dropout or random",
                is_random=True,
            )
        )
    dims = {d.name for op in forward for x in op.outputs for d in x.shape.dims}
    capacity = sorted(name for name in dims if "capacity" in name)
    if capacity:
        found.append(
            Dependence(
                f"experts take a number of examples of each group ({', '.join(capacity)}), and "
                "what is beyond it depends on the groups"
            )
        )
    statistics = _statistics(forward, batch_dims)
    if statistics:
        found.append(
            Dependence(
                f"statistics of the batch come back to its examples ({_some(statistics)}), and a "
                "microbatch has others",
                by_steps=True,
            )
        )
    return found


def _statistics(forward: Sequence[mtf.Operation], batch_dims: Sequence[str]) -> list[str]:
    """Returns operations in which something summed over the batch meets the examples again."""
    summed: dict[mtf.Tensor, bool] = {}

    def has_batch(x: mtf.Tensor) -> bool:
        return any(d.name in batch_dims for d in x.shape.dims)

    found = []
    for op in forward:
        from_sums = any(summed.get(x, False) and not has_batch(x) for x in op.inputs)
        for out in op.outputs:
            falls = any(has_batch(x) for x in op.inputs) and not has_batch(out)
            summed[out] = falls or any(summed.get(x, False) for x in op.inputs)
            if from_sums and has_batch(out) and any(has_batch(x) for x in op.inputs):
                found.append(op.name)
    return found


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(list(dict.fromkeys(names))[:3])
    return shown if len(names) <= 3 else f"{shown}, and {len(names) - 3} more"


def exchanges_in_bfloat16(graph: tf.Graph) -> bool:
    """Returns whether a SIMD program sends float32 as bfloat16: Mesh-TF's all-to-all does."""
    return any(
        op.type == "AllToAll" and op.inputs[0].dtype == tf.bfloat16 for op in graph.get_operations()
    )
