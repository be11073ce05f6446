"""Compares divisions of a program, and gives the answer: lines as text, JSON and a plot."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from mtf_gradsync._common import walk
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes._tables import terminal_width, text_table

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
    dtypes = {x.dtype for op in _behind(losses) for x in op.outputs if x.dtype.is_floating}
    narrow = [_PRECISION[dtype] for dtype in dtypes if dtype in _PRECISION]
    return max([LEAST, *(_ROUNDINGS * precision for precision in narrow)])


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
    there = _behind(losses)
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


def _behind(losses: Sequence[mtf.Tensor]) -> set[mtf.Operation]:
    """Returns the operations that losses are computed by."""
    return set(walk([x.operation for x in losses], lambda op: [x.operation for x in op.inputs]))


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


_CLOSE = 1e-3
# The largest error of a sum in bfloat16 whose terms do not cancel, and the least that shows it.
_BFLOAT16 = (2.0**-12, 2.0**-5)


def name_of_factor(factor: float, numbers: Mapping[str, float]) -> str:
    """Returns what a factor is, of numbers by what they are; "" if it is none of them."""
    found = []
    for name, value in numbers.items():
        if value and abs(factor - value) < _CLOSE * value:
            found.append(name)
        elif value and abs(factor * value - 1) < _CLOSE:
            found.append(f"1 over {name}")
    return ", or ".join(found)


def cause_of(
    what: str,
    culprit: str,
    factor: float | None,
    of_factor: str,
    error: float,
) -> str:
    """Returns what usually is the cause of a difference; "" for no idea.

    Args:
      what: what differs.
      culprit: the wrapper, axis or change without which it does not.
      factor: the number that it is multiplied by, if it is one.
      of_factor: what that number is.
      error: how far it is.
    """
    kind = culprit.split("#")[0]
    joins_steps = "Accumulation" in kind or kind == "microbatch steps" or "SyncReplicas" in kind
    if what == "copies":
        return (
            "Processors hold copies of one slice that are not equal: something writes only some "
            "of them, such as an assignment of one device's variable."
        )
    if what == "value before the update":
        return (
            "It changes on steps that only accumulate: a decay, an average or an assignment of "
            "the program's own runs on every microbatch step. Do it in the inner optimizer."
        )
    if what == "loss":
        return (
            "Gradients are equal and the loss that is shown is not: shards or microbatches have "
            "losses of other weights, or it is the loss of one shard."
        )
    if factor is not None and "microbatch steps" in of_factor and factor > 1:
        return "Microbatch gradients are added and not averaged: average_aggregated_gradients=True."
    if factor is not None and factor > 1:
        return (
            "Gradients of shards or copies are added where the mean is meant, or are summed twice: "
            "reduction=SUM, a sum of the program's own before or after that of the wrapper, or a "
            "loss for each shard that is not divided by their number."
        )
    if factor is not None and 0 < factor < 1:
        return (
            "Something divides by it that was divided already: a mean over shards of gradients "
            "that shards have parts of, as of experts, or a learning rate or loss scaled for the "
            "number of shards."
        )
    if factor == 0:
        return "No gradient reaches it: a mask or a stop_gradient that depends on the division."
    if _BFLOAT16[0] < error < _BFLOAT16[1]:
        return (
            "The size of a rounding to bfloat16: a reduction in bfloat16 (reduce_dtype, a cast of "
            "gradients), or partial sums of a product that the mesh splits."
        )
    if joins_steps:
        return (
            "Steps are joined that are not alike: a mean of means where they have unequal tokens "
            "(give weights=), clipping by each microbatch's own norm (clip inside the "
            "accumulation), or examples that are dropped."
        )
    if kind == "CrossShardOptimizer":
        return (
            "Shards are joined that are not alike: a mean of means with unequal tokens (give "
            "weights=), or a variable with a dimension that is called like the batch's."
        )
    return (
        "It is no one factor: shards or microbatches have losses of unequal weight, examples are "
        "dropped, or a dimension is called like the batch's."
    )


_SAME = "The same training, however it is divided."
EQUAL, NOT_EQUAL, MUST_DIFFER, CANNOT_BE = "equal", "NOT EQUAL", "must differ", "cannot be"


@dataclasses.dataclass(frozen=True)
class Line:
    """What was found of one division.

    Attributes:
      division: its name.
      mesh_shape: its mesh.
      layout: its layout rules.
      runtime: its runtime.
      verdict: `EQUAL`, `NOT_EQUAL`, `MUST_DIFFER` or `CANNOT_BE`.
      error: the largest error of a gradient, over the largest number of the reference's.
      expected: the error that rounding explains of that variable.
      variable: the first that differs, in the order of the backward pass.
      what: what of it differs: "gradient", "value", "loss", "copies".
      factor: the number that it is multiplied by, if it is one.
      of_factor: what that number is, such as "the number of shards".
      brought_in_by: the wrapper or mesh axis without which it is equal.
      cause: what usually is the cause, or why it cannot be or must differ.
      errors: of each variable's gradient.
    """

    division: str
    mesh_shape: str
    layout: str
    runtime: str
    verdict: str
    error: float = 0.0
    expected: float = 0.0
    variable: str = ""
    what: str = ""
    factor: float | None = None
    of_factor: str = ""
    brought_in_by: str = ""
    cause: str = ""
    errors: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def explained(self) -> str:
        """What is to be said besides the verdict; "" for nothing."""
        if self.verdict != NOT_EQUAL:
            return self.cause
        text = f"{self.what} of {self.variable}" if self.variable else self.what
        if self.factor is not None:
            text += f" is {self.factor:.2f} of what it must be"
            text += f" ({self.of_factor})" if self.of_factor else ""
        else:
            text += " differs"
        if self.brought_in_by:
            text += f"; equal without {self.brought_in_by}"
        return f"{text}. {self.cause}" if self.cause else text


@dataclasses.dataclass(frozen=True)
class Verification:
    """The answer of `verify`.

    Attributes:
      lines: one for each division, the program as it is first.
      reference: what they were compared with.
      source: what the expected rounding is known from.
      steps: how many updates were made.
      steps_per_update: how many batches each joins.
      variables: how many variables have a gradient.
      sees_gradients: whether the program has an optimizer, whose gradients were compared; else its
        values were.
      must_differ: what in the model depends on how it is divided.
    """

    lines: tuple[Line, ...]
    reference: str
    source: str
    steps: int
    steps_per_update: int
    variables: int
    sees_gradients: bool = True
    must_differ: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether no division differs by more than rounding."""
        return all(line.verdict != NOT_EQUAL for line in self.lines)

    def to_json(self) -> str:
        """Returns everything as JSON; a number that is not finite is null."""
        fields = {**dataclasses.asdict(self), "is_equal": self.is_equal}
        return json.dumps(_finite(fields), indent=2)

    def __str__(self) -> str:
        headers = ("division", "mesh", "on", "error", "expected", "result")
        rows: list[tuple[str, ...]] = []
        said: dict[str, list[str]] = {}
        for line in self.lines:
            compared = line.verdict in (EQUAL, NOT_EQUAL) or line.error > 0
            numbers = [f"{x:.1e}" if compared else "" for x in (line.error, line.expected)]
            rows.append((line.division, line.mesh_shape, line.runtime, *numbers, line.verdict))
            if line.explained:
                said.setdefault(line.explained, []).append(line.division)
        text = text_table(headers, rows, ("division", "mesh", "on", "result"))
        for explained, names in said.items():
            text += ["", *textwrap.wrap(f"{', '.join(names)}: {explained}", terminal_width())]
        many = f", {self.steps_per_update} batches each" if self.steps_per_update > 1 else ""
        plural = "s" if self.steps > 1 else ""
        what = "gradients" if self.sees_gradients else "variables (no optimizer was seen)"
        summary = (
            f"{self.variables} {what} of {self.steps} update{plural}{many}, against "
            f"{self.reference}; expected rounding by {self.source}."
        )
        wrong = [line.division for line in self.lines if line.verdict == NOT_EQUAL]
        verdict = f"Not the same training: {', '.join(wrong)}." if wrong else _SAME
        return "\n".join([*text, "", summary, verdict])

    def plot(self, path: str | Path) -> None:
        """Draws the error of each variable's gradient in each division, over the expected one.

        Raises ImportError without matplotlib.
        """
        from matplotlib.figure import Figure

        compared = [line for line in self.lines if line.errors]
        figure = Figure(figsize=(9, 1.5 + 0.45 * len(compared)), layout="constrained")
        axes = figure.add_subplot()
        for row, line in enumerate(compared):
            finite = [x for x in line.errors.values() if math.isfinite(x)]
            color = "#b3261e" if line.verdict == NOT_EQUAL else "#2a6f97"
            axes.plot([max(x, 1e-9) for x in finite], [row] * len(finite), "|", color=color, ms=12)
            axes.plot([line.expected], [row], ">", color="#777777", ms=4)
        axes.set_yticks(range(len(compared)), [line.division for line in compared])
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel("error of each variable's gradient, over its largest number (> expected)")
        figure.savefig(path, dpi=120)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
