"""Writes the tables in docs/tpu.md of what the TPU compiler expects of a step.

usage: python docs/write_tpu_cost_table.py [FILE...]

FILE: what `python -m benchmarks.tpu_cost` wrote; benchmarks/results/tpu_cost.json if none is given.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any, Callable, Sequence

OUT = pathlib.Path(__file__).parent / "tpu.md"
RESULTS = OUT.parent.parent / "benchmarks" / "results" / "tpu_cost.json"
BEGIN, END = "<!-- tpu_cost: begin -->\n", "<!-- tpu_cost: end -->\n"


def _time(row: dict[str, Any]) -> str:
    return f"{row['us']:,.1f} ({row['us/bare']:.3f})"


def _memory(row: dict[str, Any]) -> str:
    parts = [row["reduce-scatters"], row["all-gathers"]]
    counts = [row["all-reduces"], *(parts if any(parts) else [])]
    return f"{row['MB a core']:,.1f}; {', '.join(map(str, counts))}"


def _necessary(row: dict[str, Any]) -> str:
    found = [row.get(name) for name in ("us/necessary", "no copies")]
    keeps_state = row["step"].count(",") == 1 and row["step"].endswith((", update", ", skipped"))
    return "{:.3f} ({:.3f})".format(*found) if keeps_state and None not in found else ""


def _by_hand(row: dict[str, Any]) -> str:
    found = row.get("us/by hand")
    return "" if found is None else f"{found:.3f}"


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "us (us/bare)": _time,
    "us/necessary (no copies)": _necessary,
    "us/by hand": _by_hand,
    "MB a core; all-reduces, reduce-scatters, all-gathers": _memory,
}


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of the benchmark as Markdown: a column for each model and topology."""
    columns = sorted({(r["model"], r["topology"]) for r in rows})
    steps = list(dict.fromkeys(r["step"] for r in rows))
    by_place = {(r["model"], r["topology"], r["step"]): r for r in rows}
    lines = []
    for title, cell in TABLES.items():
        names = [f"{model}, {topology}" for model, topology in columns]
        lines += [f"| {title} | {' | '.join(names)} |", "|---|" + "--:|" * len(columns)]
        for step in steps:
            found = [by_place.get((*column, step)) for column in columns]
            cells = [cell(r) if r else "" for r in found]
            if any(cells):
                lines.append(f"| {step} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    files = [json.loads(pathlib.Path(name).read_text()) for name in sys.argv[1:] or [RESULTS]]
    text = OUT.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    rows = [row for file in files for row in file["rows"]]
    OUT.write_text(f"{text[:start]}\n{tables(rows)}\n{text[end:]}")
