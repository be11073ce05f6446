"""Writes docs/benchmarks.md, and tables of other pages, from files: `python -m benchmarks.page`.

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
    "best_division",
    "best_order",
    "scale",
    "accumulation",
    "sync_replicas",
    "sharded_updates",
    "sharded_sums",
    "reductions",
    "two_processes",
    "less_communication",
    "less_communication_link",
    "islands",
    "islands_saved",
    "islands_kills",
    "rounding",
    "rounding_cost",
    "spikes",
    "inner_optimizers",
    "inner_optimizers_cost",
)
# Tables that stand in a page of their own: the page, its part, and what writes it.
ELSEWHERE = {
    "tpu_cost": ("tpu.md", "what-a-tpu-would-pay", "python docs/write_tpu_cost_table.py"),
    "best_division": ("best.md", "three-models", "python -m benchmarks.page"),
    "best_order": ("best.md", "is-the-choice-right", "python -m benchmarks.page"),
    "sharded_sums": ("accumulation.md", "sums-in-parts-zero-2", "python -m benchmarks.page"),
}
# Pages with tables between marks, which this program writes.
WITH_TABLES = (ROOT / "docs" / "best.md", ROOT / "docs" / "accumulation.md")
_MARKED = re.compile(r"<!-- table (\w+) -->\n.*?<!-- end -->", re.DOTALL)
# Tables that the program of another one measures, too.
MEASURED_BY = {
    "less_communication_link": "less_communication",
    "islands_kills": "islands",
    "islands_saved": "islands",
    "inner_optimizers_cost": "inner_optimizers",
    "rounding_cost": "rounding",
}
# What a table shows, in words and a picture; figures are the table's.
READ = {
    "islands": """\
The guide on islands says [what this table shows](guides/islands.md#what-was-measured), and has a
picture of these figures.
""",
    "less_communication": """\
With two seeds, gradients in 8 bits (with or without error feedback), and outer gradients in 8 bits
or in fragments, do not measurably increase the held-out loss. Gradients in 4 bits or of rank 16
increase it by one or two hundredths of a nat. Gradients of rank 4, and outer steps with a momentum
of 0.5 or 0, increase it by 0.07 to 0.18 nats. Gradients of rank 1, and outer steps with a momentum
of 0.9, increase it by about 0.35 nats. The model still learns fast when this training ends. How
much outer steps cost in a longer training was not measured. The guide [less
communication](guides/less_communication.md) shows how to use these optimizers and strategies.

![Held-out loss by steps: the curve of 8 bits is that of float32; low ranks and outer steps lie
above](images/less_communication.png)
""",
    "rounding": """\
If bfloat16 variables are rounded to the nearest number, small updates are lost, and the model
learns less with every seed. If bfloat16 variables are rounded by chance, the loss is less than
with float32 variables for two seeds, and more for one seed. So these seeds show no difference. With
slots in bfloat16, too, the mean loss is a little more than with float32, and the loss of each seed
is less than if variables are rounded to nearest. The page
[AdamW](adamw.md#variables-in-bfloat16-rounding-by-chance) says how to round by chance.
""",
    "spikes": """\
In so short a training the losses and norms of 64 steps differ much, as the model learns fast. So
their standard deviation is large, and few poisoned batches are 6 deviations away from the mean. A
window of 16 steps finds all of them, with every seed; by the norm it also skips a few batches that
are not poisoned. Clipping alone does better here. The section [spikes](accumulation.md#spikes) says
how to skip poisoned batches.
""",
    "less_communication_link": """\
A step that sends next to nothing still takes the time of its computation and the latency of the
link.
""",
}
HEAD = """\
# Benchmarks

`python -m benchmarks.page` writes this page from the files in `benchmarks/results`. The command
above each table measures the table. Programs are measured in turns, round after round. A ratio is
the median of the ratios of all rounds, with their quartiles in brackets. Compare ratios, because
times depend on the machine. In all tables *bare* is Mesh-TensorFlow's own optimizer with
the same model, mesh, session options and resource variables, and *wrapped* is `CrossShardOptimizer`
around this optimizer. Nothing on this page was timed on a GPU or a TPU.
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
        f"`python -m benchmarks.{program}` made {'a' if name in ELSEWHERE else 'this'} table"
        f"{f' ({rest})' if rest else ''} on {machine['time'][:10]}, on a machine with "
        f"{machine['cpus']} CPU cores, Python {machine['python']} and TensorFlow "
        f"{machine['tensorflow']}."
    )
    if name in ELSEWHERE:
        where, part, program = ELSEWHERE[name]
        there = f"`{program}` writes [this table]({where}#{part}) on another page."
        return f"## {heading}\n\n{about} {there}\n"
    lines = [f"## {heading}", "", about, "", *_rows_and_notes(table)]
    if name in READ:
        lines.append(READ[name])
    return "\n".join(lines)


def _rows_and_notes(table: dict[str, Any]) -> list[str]:
    columns = list(table["rows"][0])
    lines = [_line(columns), _line(["---"] * len(columns))]
    lines += [_line([_cell(row.get(column)) for column in columns]) for row in table["rows"]]
    return [*lines, "", *table["notes"], ""] if table["notes"] else [*lines, ""]


def with_tables(text: str, results: Path = RESULTS) -> str:
    """Returns the text of a page with its tables as they are in the results.

    A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``.
    """

    def written(mark: re.Match[str]) -> str:
        table = json.loads((results / f"{mark[1]}.json").read_text("utf-8"))
        lines = [f"<!-- table {mark[1]} -->", *_rows_and_notes(table), "<!-- end -->"]
        return "\n".join(lines)

    return _MARKED.sub(written, text)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return report.cell(timing.Spread(**value) if isinstance(value, dict) else value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    for path in WITH_TABLES:
        path.write_text(with_tables(path.read_text("utf-8")), encoding="utf-8")
        print(f"wrote the tables of {path.relative_to(ROOT)}")
