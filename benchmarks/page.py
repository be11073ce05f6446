"""Writes docs/benchmarks.md from measured tables: `python -m benchmarks.page`.

`python -m benchmarks --out_dir=benchmarks/results` measures all tables and writes their JSON
files; `python -m benchmarks.NAME --out_dir=benchmarks/results` measures one. This program makes
the page from the files, so that no figure on it is typed by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import report, timing

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
# The order of the page; a table that is not named here follows in the order of the alphabet.
ORDER = (
    "training_step",
    "runtimes",
    "simd_collectives",
    "tpu_cost",
    "tpu_sizes",
    "plan",
    "scale",
    "accumulation",
    "sync_replicas",
    "sharded_updates",
    "reductions",
    "two_processes",
    "less_communication",
    "less_communication_link",
    "islands",
    "islands_saved",
    "islands_kills",
    "rounding",
    "rounding_cost",
)
# Tables that stand in a page of their own: the page, its part, and what writes it.
ELSEWHERE = {"tpu_cost": ("tpu.md", "what-a-tpu-would-pay", "python docs/write_tpu_cost_table.py")}
# Tables that the program of another one measures, too.
MEASURED_BY = {
    "less_communication_link": "less_communication",
    "islands_kills": "islands",
    "islands_saved": "islands",
    "rounding_cost": "rounding",
}
# What a table shows, in words and a picture; figures are the table's.
READ = {
    "islands": """\
[What it shows](guides/islands.md#what-was-measured), with a picture.
""",
    "less_communication": """\
8 bits, and outer gradients in 8 bits or in fragments, cost nothing that two seeds could show, with
error feedback or without; 4 bits and a high rank cost one or two hundredths of a nat, rank 4 and
outer steps about a tenth, rank 1 a third. The model still learns fast when training ends: how much
outer steps cost a longer training was not measured. How to use them: [less
communication](guides/less_communication.md).

![Held-out loss by steps: 8 bits lie on float32, low ranks and outer steps
above](images/less_communication.png)
""",
    "rounding": """\
Rounded to nearest, small updates are lost, and the model learns less. Rounded by chance, its loss
is that of float32 variables to what is seen of it here, with slots in bfloat16, too: the loss of a
batch is a bfloat16 number, and these are 1/64 apart. How to use it:
[AdamW](adamw.md#variables-in-bfloat16-rounding-by-chance).
""",
    "less_communication_link": """\
What remains of a step where next to nothing is sent is computing and the latency of the link.
""",
}
HEAD = """\
# Benchmarks

`python -m benchmarks.page` writes this page from the files in `benchmarks/results`; each table
names the command that measures it. Ratios are medians of the ratios of interleaved rounds, in
brackets their quartiles: compare ratios, since times depend on the machine. *bare* is
Mesh-TensorFlow's own optimizer with the same model, mesh, session options and resource variables;
*wrapped* is `CrossShardOptimizer` around it. Nothing here was timed on a GPU or a TPU.
"""


def page(results: Path = RESULTS) -> str:
    """The text of the page.

    Args:
      results: the folder of the tables' JSON files.

    Returns:
      Markdown.
    """
    tables = {path.stem: json.loads(path.read_text("utf-8")) for path in results.glob("*.json")}
    names = sorted(tables, key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))
    return "\n".join([HEAD, *(_section(name, tables[name]) for name in names)])


def _section(name: str, table: dict[str, Any]) -> str:
    """A table with its command, machine, notes and targets."""
    title = table["title"].partition("\n")[0]
    heading, _, rest = re.sub(r"\s*\(.*", "", title).partition(", ")
    machine = table["machine"]
    program = MEASURED_BY.get(name, name)
    about = (
        f"`python -m benchmarks.{program}`{': ' + rest if rest else ''}. {machine['cpus']} cores, "
        f"Python {machine['python']}, TensorFlow {machine['tensorflow']}, {machine['time'][:10]}."
    )
    if name in ELSEWHERE:
        where, part, program = ELSEWHERE[name]
        return f"## {heading}\n\n{about} `{program}` writes [its tables]({where}#{part}).\n"
    columns = list(table["rows"][0])
    lines = [f"## {heading}", "", about, "", _line(columns), _line(["---"] * len(columns))]
    lines += [_line([_cell(row.get(column)) for column in columns]) for row in table["rows"]]
    lines += ["", *table["notes"], ""] if table["notes"] else [""]
    if name in READ:
        lines.append(READ[name])
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return report.cell(timing.Spread(**value) if isinstance(value, dict) else value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
