"""A comparison of two training steps as text for a terminal."""

from __future__ import annotations

from typing import Iterable, Sequence

from mtf_gradsync.simd import CommunicationReport, CommunicationRow, Total
from mtf_gradsync.train.comparison.comparison import Comparison, Step
from mtf_gradsync.train.comparison.step_parts import GRADIENTS, PARTS

_TITLES = ("bare", "wrapped")
_PART_LABELS = dict(zip(PARTS, ("forward and backward pass", "gradients", "optimizer")))
_BRANCHES, _UPDATE_STEP = "in branches", "update step"
_WIDTH = 118
# Columns that are cut where a line gets too long, and how they share what room there is.
_SHARES = {"group": 2, "where": 4, "variables": 4, "at": 5}
_NOTHING = Total(operations=0, runs=0, bytes_per_core=0, is_exact=True)


def as_text(comparison: Comparison, rows: bool = False) -> str:
    """Totals of both steps side by side, and the collectives that sum gradients.

    Args:
      comparison: both steps.
      rows: also all other collectives and transfers, one a line.

    Returns:
      Lines of at most 120 characters.
    """
    steps = (comparison.bare, comparison.wrapped)
    lines = [f"mesh {comparison.mesh}"]
    lines += [f"{title:8} {_stack(step)}" for title, step in zip(_TITLES, steps)]
    if comparison.bare is comparison.wrapped:
        lines.append("The optimizer of this config has no wrapper, so both columns are the same.")
    lines += ["", "Collectives of the SIMD (TPU) program in one step", ""]
    lines += _totals([_collective_lines(step) for step in steps])
    if comparison.bare.transfers and comparison.wrapped.transfers:
        lines += ["", "Transfers between the devices of a placement mesh in one step", ""]
        lines += _totals(
            [_report_lines(s.transfers) + _group_lines(s.transfers) for s in steps if s.transfers]
        )
    lines += [
        "",
        "bytes: what one core puts into a collective, or a device receives, on average.",
        "share: of the bytes of an update step, which takes every branch.",
    ]
    for title, step in zip(_TITLES, steps):
        if rows:
            lines += ["", f"All collectives, {title}", "", *_table(step.collectives.rows, step)]
        elif title == "wrapped":
            sums = step.of_part(GRADIENTS).rows
            lines += ["", f"Collectives that sum gradients, {title}", "", *_table(sums)]
    if rows:
        for title, step in zip(_TITLES, steps):
            if step.transfers:
                lines += ["", f"All transfers, {title}", "", *_table(step.transfers.rows)]
    return "\n".join(lines)


def _stack(step: Step) -> str:
    return " > ".join(step.optimizers)


def _collective_lines(step: Step) -> list[tuple[str, Total]]:
    parts = [(f"  {_PART_LABELS[part]}", step.of_part(part).update_step) for part in PARTS]
    return _report_lines(step.collectives) + parts + _group_lines(step.collectives)


def _report_lines(report: CommunicationReport) -> list[tuple[str, Total]]:
    return [
        ("every step", report.every_step),
        (_BRANCHES, report.conditional),
        (_UPDATE_STEP, report.update_step),
    ]


def _group_lines(report: CommunicationReport) -> list[tuple[str, Total]]:
    return [(f"  over {group}", total) for group, total in report.by_group().items()]


def _totals(sides: Sequence[list[tuple[str, Total]]]) -> list[str]:
    """Labelled totals of both sides; a label that one side lacks stands for nothing there."""
    labels = list(dict.fromkeys(label for side in sides for label, _ in side))
    if not any(total.operations for side in sides for label, total in side if label == _BRANCHES):
        labels = [label for label in labels if label not in (_BRANCHES, _UPDATE_STEP)]
    width = max(map(len, labels))
    columns = f"{'operations':>12}{'runs':>8}{'bytes':>16}{'share':>7}"
    lines = [
        " " * width + "".join(f"  {title:^{len(columns)}}".rstrip().ljust(45) for title in _TITLES),
        " " * width + f"  {columns}" * 2,
    ]
    for label in labels:
        cells = ""
        for side in sides:
            totals = dict(side)
            cells += "  " + _cells(totals.get(label, _NOTHING), totals[_UPDATE_STEP])
        lines.append(f"{label:{width}}{cells}".rstrip())
    return [line.rstrip() for line in lines]


def _cells(total: Total, whole: Total) -> str:
    about = "" if total.is_exact else ">="
    share = f"{total.bytes_per_core / whole.bytes_per_core:.0%}" if whole.bytes_per_core else "-"
    return (
        f"{total.operations:>12,}{about + format(total.runs, ','):>8}"
        f"{about + format(total.bytes_per_core, ','):>16}{share:>7}"
    )


def _table(rows: Iterable[CommunicationRow], step: Step | None = None) -> list[str]:
    """One line a row; a column that is empty everywhere is left out."""
    lines = []
    for row in rows:
        line = {
            "operation": row.operation,
            "dtype": row.dtype,
            "bytes": "?" if row.bytes_per_core is None else f"{row.bytes_per_core:,}",
            "group": row.group,
            "where": row.where,
            "part": step.part[row.name] if step else "",
            "variables": _variables(row.variables),
            "at": row.name.rpartition("/")[0] or row.name,
        }
        lines.append(line)
    if not lines:
        return ["none"]
    columns = [column for column in lines[0] if any(line[column] for line in lines)]
    widths = _fit({c: max(len(c), *(len(line[c]) for line in lines)) for c in columns})
    header = {column: column for column in columns}
    rule = {column: "-" * widths[column] for column in columns}
    return [
        "  ".join(_cell(column, line[column], widths[column]) for column in columns).rstrip()
        for line in [header, rule, *lines]
    ]


def _fit(widths: dict[str, int]) -> dict[str, int]:
    """Narrower columns, where the line would be too long; short ones keep their width."""
    room = _WIDTH - 2 * (len(widths) - 1)
    room -= sum(width for column, width in widths.items() if column not in _SHARES)
    flexible = [column for column in _SHARES if column in widths]
    fitted = dict(widths)
    # From the least demanding column to the most, so that each passes on what it does not need.
    for column in sorted(flexible, key=lambda c: widths[c] / _SHARES[c]):
        share = room * _SHARES[column] // sum(_SHARES[c] for c in flexible)
        fitted[column] = min(widths[column], max(share, len(column)))
        room -= fitted[column]
        flexible.remove(column)
    return fitted


def _cell(column: str, text: str, width: int) -> str:
    if len(text) > width:
        # Without its middle: names say most at their ends.
        front = max(0, width - 3) // 3
        text = f"{text[:front]}...{text[len(text) - max(0, width - 3 - front) :]}"
    return text.rjust(width) if column == "bytes" else text.ljust(width)


def _variables(names: Sequence[str] | None) -> str:
    if not names:
        return ""
    return names[0] if len(names) == 1 else f"{len(names)} variables"
