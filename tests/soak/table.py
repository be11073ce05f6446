"""What a soak saw, as a table."""

from __future__ import annotations

from typing import Any, Sequence

import tabulate


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Faults by kind, and in all: how many, how many ended in the same bits, and the slowest end.

    Args:
      rows: `tests.soak.lane.Row` as dicts.

    Returns:
      Markdown.
    """
    kinds = sorted({row["fault"] for row in rows})
    lines = [_line(kind, [row for row in rows if row["fault"] == kind]) for kind in kinds]
    lines.append(_line("all", rows))
    runtimes = sorted({row["runtime"] for row in rows})
    more = [_line(name, [row for row in rows if row["runtime"] == name]) for name in runtimes]
    headers = ["", "faults", "same bits after", "as it should be", "slowest end, s"]
    return "\n\n".join(
        tabulate.tabulate(part, headers=headers, tablefmt="pipe") for part in (lines, more)
    )


def _line(name: str, rows: Sequence[dict[str, Any]]) -> list[Any]:
    seconds = max((row["seconds"] for row in rows), default=0.0)
    return [
        name,
        len(rows),
        sum(row["same_bits"] for row in rows),
        sum(not row["problems"] for row in rows),
        f"{seconds:.1f}" if seconds else "",
    ]
