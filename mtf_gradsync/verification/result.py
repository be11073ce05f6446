"""What `verify` answers: a line for each division, as text, JSON and a plot."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from pathlib import Path
from typing import Any, Sequence

from mtf_gradsync._tables import terminal_width, text_table

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
