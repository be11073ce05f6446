"""What all tables share: the command line, the table on the terminal, JSON and pictures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, Mapping, NamedTuple, Sequence

import absl.flags

from benchmarks.timing import Spread
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.settings import enable_mesh_defaults

Row = Dict[str, Any]


class Options(NamedTuple):
    """How thoroughly to measure.

    Attributes:
      rounds: rounds of interleaved timing.
      quick: small models and few settings, to see that a table works; the figures mean nothing.
      only: parts of a table to measure, by the name of what they are parts of; all of what is not
        named.
      settings: numbers that a table takes, by name.
      out_dir: where the files of tables go; None for no files.
    """

    rounds: int
    quick: bool
    only: Mapping[str, Sequence[Any]] = MappingProxyType({})
    settings: Mapping[str, Any] = MappingProxyType({})
    out_dir: Path | None = None


class Target(NamedTuple):
    """A bound that a figure must keep; the unit "x" means a ratio."""

    what: str
    value: float
    bound: float
    unit: str = "x"

    @property
    def met(self) -> bool:
        """Whether the bound is kept."""
        return self.value <= self.bound


class Table(NamedTuple):
    """A measured table.

    Attributes:
      name: the module's name, and the name of its files.
      title: what is compared.
      rows: dictionaries with the same keys, which are the columns. A `Spread` is shown as its
        median and quartiles.
      notes: lines below the table.
      targets: bounds that figures of the table must keep.
      plot: draws the table into matplotlib axes, or None.
    """

    name: str
    title: str
    rows: list[Row]
    notes: Sequence[str] = ()
    targets: Sequence[Target] = ()
    plot: Callable[[Any], None] | None = None


def prepare() -> None:
    """Makes this process one that builds and runs Mesh-TF programs."""
    tf.logging.set_verbosity(tf.logging.ERROR)
    # Mesh-TF's SIMD mesh reads absl flags, which have their defaults here.
    absl.flags.FLAGS.mark_as_parsed()
    enable_mesh_defaults()


def main(
    measures: Sequence[Callable[[Options], Table]],
    command: str,
    parts: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Measures tables, prints them and writes their files.

    Args:
      measures: functions that measure a table each.
      command: the command that the program was started by, for its help.
      parts: what `Options.only` can choose among, each by an option of its own.
      settings: the defaults of `Options.settings`, each an option of its own.

    Returns:
      The exit code: 1 if --check was given and a target was missed.
    """
    parser = argparse.ArgumentParser(prog=command, description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of interleaved timing")
    parser.add_argument("--quick", action="store_true", help="small models: does it work at all?")
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    parser.add_argument("--png", action="store_true", help="draw the tables that have a picture")
    parser.add_argument(
        "--out_dir", type=Path, default=Path("runs/benchmarks"), help="where the files go"
    )
    for name, values in parts.items():
        parser.add_argument(
            f"--{name}",
            nargs="+",
            type=type(values[0]),
            choices=values,
            default=values,
            help=f"which {name} to measure, all if not given",
        )
    for name, default in settings.items():
        parser.add_argument(
            f"--{name}", type=type(default), default=default, help=f"{default} if not given"
        )
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be 1 or more, got {args.rounds}")
    prepare()
    options = Options(
        rounds=min(args.rounds, 3) if args.quick else args.rounds,
        quick=args.quick,
        only={name: tuple(getattr(args, name)) for name in parts},
        settings={name: getattr(args, name) for name in settings},
        out_dir=args.out_dir,
    )
    missed = 0
    for measure in measures:
        table = measure(options)
        print(as_text(table), end="\n\n", flush=True)
        write(table, options)
        if args.png and table.plot:
            _draw(table, args.out_dir / f"{table.name}.png")
        missed += sum(not target.met for target in table.targets)
    print(f"JSON in {args.out_dir}/")
    return 1 if args.check and missed else 0


def write(table: Table, options: Options) -> None:
    """Writes a table's file, if files were asked for; of a long measurement after each row, too."""
    if options.out_dir is not None:
        options.out_dir.mkdir(parents=True, exist_ok=True)
        text = json.dumps(as_json(table, options), indent=2) + "\n"
        (options.out_dir / f"{table.name}.json").write_text(text, encoding="utf-8")


def as_text(table: Table) -> str:
    """The table as lines of text."""
    columns = list(table.rows[0])
    cells = [columns, *[[cell(row[column]) for column in columns] for row in table.rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    numeric = [not isinstance(table.rows[0][column], str) for column in columns]
    lines = [table.title, ""]
    for number, line in enumerate(cells):
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric)
        ]
        lines.append("  ".join(padded).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    lines += ["", *table.notes] if table.notes else []
    for target in table.targets:
        verdict = "met" if target.met else "MISSED"
        lines.append(
            f"target: {target.what} at most {target.bound:g}{target.unit}: "
            f"{target.value:.3f}{target.unit}, {verdict}"
        )
    return "\n".join(lines)


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, Spread):
        return f"{_number(value.median)} ({_number(value.low)} to {_number(value.high)})"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def as_json(table: Table, options: Options) -> Row:
    """The table as a JSON object, with what is needed to judge the figures."""
    return {
        "name": table.name,
        "title": table.title,
        "options": {
            "rounds": options.rounds,
            "quick": options.quick,
            "only": dict(options.only),
            "settings": dict(options.settings),
        },
        "machine": {
            "python": platform.python_version(),
            "tensorflow": tf.version.VERSION,
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
        "rows": [
            {k: v._asdict() if isinstance(v, Spread) else v for k, v in row.items()}
            for row in table.rows
        ],
        "notes": list(table.notes),
        "targets": [{**target._asdict(), "met": target.met} for target in table.targets],
    }


def _draw(table: Table, path: Path) -> None:
    # Not pyplot, which would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    table.plot(figure.add_subplot())
    figure.savefig(path, dpi=150)
    print(f"picture in {path}")
