"""Writes the table in docs/tpu.md of what the TPU compiler expects of a step.

usage: python docs/write_tpu_cost_table.py FILE..., the JSON of `python -m benchmarks.tpu_cost`.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any, Sequence

OUT = pathlib.Path(__file__).parent / "tpu.md"
BEGIN, END = "<!-- tpu_cost: begin -->\n", "<!-- tpu_cost: end -->\n"
COLUMNS = {
    "step": "{}",
    "us": "{:,.1f}",
    "us/bare": "{:.3f}",
    "us/necessary": "{:.3f}",
    "no copies": "{:.3f}",
    "MB touched": "{:,.1f}",
    "MB a core": "{:,.1f}",
    "all-reduces": "{}",
    "reduce-scatters": "{}",
    "all-gathers": "{}",
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown, a table for each model and topology, those of a model side by side."""
    order = sorted(dict.fromkeys((r["model"], r["topology"]) for r in rows))
    lines = []
    for model, topology in order:
        lines += [f"**{model}, {topology}**", "", "| " + " | ".join(COLUMNS) + " |"]
        lines.append("|---|" + "--:|" * (len(COLUMNS) - 1))
        for row in rows:
            if (row["model"], row["topology"]) == (model, topology):
                cells = [COLUMNS[n].format(row[n]) if n in row else "" for n in COLUMNS]
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    files = [json.loads(pathlib.Path(name).read_text()) for name in sys.argv[1:]]
    text = OUT.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    rows = [row for file in files for row in file["rows"]]
    OUT.write_text(f"{text[:start]}\n{table(rows)}\n{text[end:]}")
