"""The result of `verify`: a line for each division, as text, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from pathlib import Path
from typing import Any, NamedTuple, Sequence

from mtf_gradsync.runtimes._tables import terminal_width, text_table

EQUAL, NOT_EQUAL, NOT_SHOWN, CANNOT_BE = "equal", "NOT EQUAL", "not shown", "cannot be"
_COLORS = {EQUAL: "#2a6f97", NOT_EQUAL: "#b3261e", NOT_SHOWN: "#e09f3e", CANNOT_BE: "#777777"}
_EXIT_CODES = {EQUAL: 0, NOT_EQUAL: 1, NOT_SHOWN: 3}


class Compared(NamedTuple):
    """The numbers of variables that were compared with the reference.

    Attributes:
      gradients: the number of variables whose gradients were compared, and are not all zero.
      values: the number of variables with a gradient whose new values were compared.
      slots: the number of other variables that were compared: slots, and untrained variables of the
        program.
    """

    gradients: int = 0
    values: int = 0
    slots: int = 0


@dataclasses.dataclass(frozen=True)
class DivisionResult:
    """The result of one division: whether its update equals the reference's.

    Attributes:
      division: the division's name.
      mesh_shape: the shape of the mesh.
      layout: the layout rules.
      runtime: the runtime's name.
      verdict: `EQUAL`, `NOT_EQUAL`, `NOT_SHOWN` (the comparison proves nothing) or `CANNOT_BE` (the
        program does not run in this division).
      error: the error of the first variable that differs, relative to the reference's largest
        number; if none differs, the error of the gradient that is closest to differing.
      expected: the largest error of the same variable that rounding explains.
      variable: the first variable that differs, in the order of the backward pass.
      what: the kind of value that differs: "gradient", "value", "slot", "loss", "copies" (a
        variable's copies on cores), "random numbers", or "value before the update".
      factor: the number by which the reference's gradient (or, if a value differs, the reference's
        change of this value) has to be multiplied to give the division's; None if it is not one
        number for all elements.
      of_factor: the meaning of `factor`, such as "the number of shards".
      brought_in_by: the wrapper, mesh axis or other part of the division without which its update
        equals the reference's; "" if unknown.
      cause: in words, the likely cause of a difference, why nothing is shown, or why the program
        cannot run.
      errors: a dictionary from the names of variables to the errors of their gradients.
      compared: how many variables were compared.
      not_shown: names of variables whose gradient is zero everywhere or not finite.
      without: the parts that were removed from the program before the comparison, such as "random
        numbers".
      is_asked: whether the user asked for this division; other divisions are tried by default, and
        may be impossible.
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
    compared: Compared = dataclasses.field(default_factory=Compared)
    not_shown: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    is_asked: bool = False

    @property
    def explained(self) -> str:
        """What differs and why, or why nothing was shown, in words; "" if nothing is to explain."""
        if self.verdict == EQUAL and self.without:
            text = f"equal without {' and '.join(self.without)}"
            return f"{text}. {self.cause}" if self.cause else f"{text}."
        if self.verdict != NOT_EQUAL:
            return self.cause
        if self.what == "random numbers":
            along = f"random numbers of {self.variable} are alike along {self.brought_in_by}"
            return f"{along}. {self.cause}"
        text = f"{self.what} of {self.variable}" if self.variable else self.what
        if self.factor is not None:
            text = f"change of {self.variable}" if self.what == "value" else text
            text += f" is {self.factor:.2f} of what it must be"
            text += f" ({self.of_factor})" if self.of_factor else ""
        else:
            text += " differ" if self.what == "copies" else " differs"
        if self.brought_in_by:
            text += f"; equal without {self.brought_in_by}"
        return f"{text}. {self.cause}" if self.cause else text


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
      lines: the result of each division; the first is the division that the user configured.
      reference: the reference with which divisions were compared, in words.
      source: how the expected rounding was found, such as "float64".
      steps: the number of updates that were made.
      batches: for each update, the number of its batches.
      variables: the number of variables that have a gradient.
      sees_gradients: whether an optimizer was seen, so that gradients could be compared. If False,
        only values were compared.
    """

    lines: tuple[DivisionResult, ...]
    reference: str
    source: str
    steps: int
    batches: tuple[int, ...]
    variables: int
    sees_gradients: bool = True

    @property
    def steps_per_update(self) -> int:
        """The largest number of batches in an update."""
        return max(self.batches)

    @property
    def verdict(self) -> str:
        """The worst verdict of all divisions: `NOT_EQUAL`, else `NOT_SHOWN`, else `EQUAL`."""
        if any(line.verdict == NOT_EQUAL for line in self.lines):
            return NOT_EQUAL
        return NOT_SHOWN if self._unproven() else EQUAL

    @property
    def is_equal(self) -> bool:
        """Whether the update was shown to be equal in all divisions."""
        return self.verdict == EQUAL

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 0 for `EQUAL`, 1 for `NOT_EQUAL`, 3 for `NOT_SHOWN`."""
        return _EXIT_CODES[self.verdict]

    def _unproven(self) -> list[DivisionResult]:
        """Returns the divisions whose update was neither shown to be equal nor to differ.

        For these divisions the comparison with the reference proves nothing, or the user asked for
        the division and the program does not run in it.
        """
        return [
            line
            for line in self.lines
            if line.verdict == NOT_SHOWN or (line.verdict == CANNOT_BE and line.is_asked)
        ]

    def to_json(self) -> str:
        """Returns the whole result as JSON text, with null for numbers that are not finite.

        The keys of the JSON object are the names of the attributes of `Verification`, and
        "steps_per_update", "is_equal" and "verdict".
        """
        lines = [{**vars(line), "compared": line.compared._asdict()} for line in self.lines]
        found = ("steps_per_update", "is_equal", "verdict")
        fields = {**vars(self), "lines": lines, **{name: getattr(self, name) for name in found}}
        return json.dumps(_finite(fields), indent=2)

    def __str__(self) -> str:
        headers = ("division", "mesh", "on", "error", "expected", "result")
        rows: list[tuple[str, ...]] = []
        said: dict[str, list[str]] = {}
        for line in self.lines:
            has_numbers = line.verdict in (EQUAL, NOT_EQUAL) or line.error > 0
            numbers = [f"{x:.1e}" if has_numbers else "" for x in (line.error, line.expected)]
            rows.append((line.division, line.mesh_shape, line.runtime, *numbers, line.verdict))
            if line.explained:
                said.setdefault(line.explained, []).append(line.division)
        text = text_table(headers, rows, ("division", "mesh", "on", "result"))
        for explained, names in said.items():
            text += ["", *textwrap.wrap(f"{', '.join(names)}: {explained}", terminal_width())]
        return "\n".join([*text, "", self._summary(), self._last_line()])

    def _summary(self) -> str:
        many = f", {self.steps_per_update} batches each" if self.steps_per_update > 1 else ""
        if len(set(self.batches)) > 1:
            many = f", of {', '.join(map(str, self.batches))} batches"
        plural = "s" if self.steps > 1 else ""
        seen = "" if self.sees_gradients else " (no optimizer was seen)"
        done = self.lines[0].compared if self.lines else Compared()
        counts = ", ".join(f"{number} {kind}" for kind, number in done._asdict().items() if number)
        return (
            f"{counts or 'nothing'}{seen} of {self.steps} update{plural}{many}, against "
            f"{self.reference}; expected rounding by {self.source}."
        )

    def _last_line(self) -> str:
        if self.verdict == NOT_EQUAL:
            wrong = [line.division for line in self.lines if line.verdict == NOT_EQUAL]
            return f"Not the same training: {', '.join(wrong)}."
        if self.verdict == NOT_SHOWN:
            return f"Not shown: {', '.join(line.division for line in self._unproven())}."
        out = list(dict.fromkeys(x for line in self.lines for x in line.without))
        if out:
            return f"Equal without {' and '.join(out)}, which depend on how it is divided."
        count = sum(line.verdict == EQUAL for line in self.lines)
        if count < len(self.lines):
            if count == 1:
                return "The same training in the one division that can be."
            return f"The same training in each of the {count} divisions that can be."
        return "The same training, however it is divided."

    def plot(self, path: str | Path) -> None:
        """Draws the errors of gradients into a picture, with a row for each division.

        A triangle in each row marks the largest error that rounding explains. Errors that are not
        finite are drawn at the right edge. If a division's verdict is not `EQUAL`, its row names a
        variable: the first that differs, or the one with the largest error.

        Args:
          path: the file to write. Its ending decides the format, such as ".png".

        Raises:
          ImportError: when matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 1.5 + 0.45 * len(self.lines)), layout="constrained")
        axes = figure.add_subplot()
        finite = [x for line in self.lines for x in line.errors.values() if math.isfinite(x)]
        edge = 10 * max([1.0, *finite])
        for row, line in enumerate(self.lines):
            color = _COLORS[line.verdict]
            errors = {k: max(x, 1e-9) if math.isfinite(x) else edge for k, x in line.errors.items()}
            axes.plot(list(errors.values()), [row] * len(errors), "|", color=color, ms=12)
            if errors:
                axes.plot([line.expected], [row], ">", color="#777777", ms=4)
            named = line.variable or (max(errors, key=lambda k: errors[k]) if errors else "")
            if line.verdict != EQUAL:
                text = f"{line.verdict}: {named}" if named else line.verdict
                place = (errors.get(named, 1e-9), row)
                axes.annotate(text, place, xytext=(0, 7), textcoords="offset points", fontsize=7,
                              color=color, ha="right" if place[0] > 1e-4 else "left")  # fmt: skip
        axes.set_yticks(range(len(self.lines)), [line.division for line in self.lines])
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(5e-10, 2 * edge)
        axes.set_xlabel("error of each variable's gradient, over its largest number (> expected)")
        figure.savefig(path, dpi=120)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
