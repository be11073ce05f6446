"""What a soak saw, as the tables of docs/trouble.md."""

from __future__ import annotations

from typing import Any, Sequence

_COLUMNS = ["", "faults", "same bits after", "as it should be", "slowest end, s"]


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Faults by kind and by runtime: how many, how many ended in the same bits, the slowest end.

    Args:
      rows: `tests.soak.lane.Row` as dicts.

    Returns:
      Markdown.
    """
    kinds = _lines(rows, "fault")
    runtimes = _lines(rows, "runtime")
    for line in runtimes:
        own = [row["cpu_seconds"] for row in rows if row["runtime"] == line[0]]
        line.append(f"{sum(own) / len(own):.1f}")
    kinds.append(_line("all", rows))
    return f"{_table(_COLUMNS, kinds)}\n\n{_table([*_COLUMNS, 'CPU s for each'], runtimes)}"


def _lines(rows: Sequence[dict[str, Any]], by: str) -> list[list[str]]:
    names = sorted({row[by] for row in rows})
    return [_line(name, [row for row in rows if row[by] == name]) for name in names]


def _line(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    seconds = max((row["seconds"] for row in rows), default=0.0)
    same, good = (row["same_bits"] for row in rows), (not row["problems"] for row in rows)
    slowest = f"{seconds:.1f}" if seconds else ""
    return [name, str(len(rows)), str(sum(same)), str(sum(good)), slowest]


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = "|---" * len(columns) + "|"
    head, *body = ("| " + " | ".join(line) + " |" for line in (columns, *lines))
    return "\n".join([head, rule, *body])
