"""The result of planning: a row for each mesh and machine, as a table, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from mtf_gradsync.runtimes._tables import text_table, wrapped

_UNKNOWN = (
    "A prediction is no timing. It adds up the times of the compiled operations, each at its "
    "roofline (the longer of its arithmetic at the chip's published peak and its bytes at the "
    "memory's bandwidth), and the times of the collectives at the links' published rates. It does "
    'not know what overlaps (if operations and links overlap completely, a step takes "at best"), '
    "how long the host and the input take, nor other traffic on the links."
)

_SHARES = (
    "MFU is the share of the chips' peak that the model needs (6 operations for each weight and "
    "token, and attention). HFU is the share that the program takes by the compiler's count, with "
    "recomputed operations."
)


@dataclasses.dataclass(frozen=True)
class AxisTraffic:
    """The collectives of a step along one mesh axis, or along several axes at once.

    Attributes:
      axis: names of the axes, joined by "+".
      collectives: the number of collectives that run in a step.
      bytes_per_core: the bytes that each core gives to these collectives, all together.
      seconds: the time that the collectives take on the links.
    """

    axis: str
    collectives: int
    bytes_per_core: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class FewerMessages:
    """The time of a step if TPU slices exchange values only once in several steps.

    Attributes:
      way: how TPU slices exchange values: by an "OuterOptimizer", or as "islands" (separate
        programs that exchange changes through a folder).
      inner_steps: the number of steps from one exchange to the next.
      step_seconds: the mean time of a step, with its share of the exchange.
      exchange_seconds: the time of one exchange over the data center network.
    """

    way: str
    inner_steps: int
    step_seconds: float
    exchange_seconds: float


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """The predicted cost of a step on one mesh of one machine.

    Attributes:
      mesh_shape: the mesh shape, such as "batch:4;model:2".
      layout: the layout rules, such as "batch:batch;heads:model".
      machine: the topology, such as "v5e:4x4".
      cores: the number of the machine's cores.
      fits: whether the program fits into the memory of a core.
      bytes_per_core: memory that the program takes on one core.
      memory_per_core: bytes that a program may use on one core; None where there is no limit.
      flops: floating-point operations of one core in a step, by the compiler's count.
      bytes_accessed: bytes that one core's operations read and write in a step.
      estimate_seconds: the time of the program's operations one after the other, without the links;
        `estimate_source` says how it is found.
      unknown_operations: the number of custom calls whose arithmetic is unknown, so that only their
        bytes count.
      traffic: the collectives, by mesh axis.
      link_seconds: the time that all collectives take on the links.
      step_seconds: the predicted time of a step: `estimate_seconds` plus `link_seconds`.
      overlapped_seconds: the larger of `estimate_seconds` and `link_seconds`: the time of a step in
        which operations and links overlap completely.
      tokens_per_second: the predicted rate, computed from `mean_step_seconds`; None if the number
        of tokens in a step is unknown.
      share_of_peak: the operations that the compiler counts, divided by the operations that the
        chip could make at its peak in `mean_step_seconds` ("hardware FLOPs utilization", HFU). None
        if the peak is unknown. Recomputed operations count twice, so compare programs by `mfu`.
      build_seconds: the time that building the program took.
      compile_seconds: the time that the compiler took.
      is_repeated: whether an equal program had been compiled before, so that this one was not
        compiled again.
      unknown_names: the targets of the custom calls in `unknown_operations`.
      loops_counted_once: the number of loops of which only one iteration is counted, because their
        number of iterations is unknown.
      is_of_update: whether the program has conditionals. If it has, the figures are those of a step
        in which all conditions are true: with accumulation, the step that makes the update.
      parameters: the number of trainable parameters; None if unknown.
      steps_per_update: the number of steps of which one makes the update; see `Built`.
      skipped_step_seconds: the predicted time of a step in which all conditions are false, links
        included; None if the program has no conditionals.
      skipped_step_traffic: the collectives, by mesh axis, of a step in which all conditions are
        false.
      mean_step_seconds: the mean time over `steps_per_update` steps, of which one makes the update.
        It is `step_seconds` if `steps_per_update` is 1, or if the program has no conditionals.
      estimate_source: "roofline" for the rooflines of all operations at the chip's published rates,
        "measured" for rates that were measured on this machine.
      roofline_seconds: the roofline of the whole step: `flops` at the peak or `bytes_accessed` at
        the memory's bandwidth, whichever takes longer; None if the rates are unknown.
      doubt: why the estimate cannot be right, compared with `roofline_seconds`; "" if it can be
        right. Rows with a doubt come last in a `Plan`.
      model_flops: operations that the model needs in a step on all cores together, as
        `Built.model_flops` gives them; None if unknown.
      mfu: `model_flops` divided by the operations that all chips could make at their peak in
        `mean_step_seconds` ("model FLOPs utilization"). None if `model_flops` or the peak is
        unknown.
      dollars_per_hour: what an hour of all the machine's chips costs; None if no price was given.
      tokens_per_dollar: the number of tokens that are trained for a dollar; None if
        `dollars_per_hour` or `tokens_per_second` is unknown.
      slices: the number of TPU slices that a data center network joins.
      dcn_seconds: the part of `link_seconds` spent on the data center network (the axis "DCN").
      fewer_messages: the times of a step if TPU slices exchange values only once in several steps.
        It is empty for one TPU slice, and if the mesh axis between TPU slices does not split the
        batch.
    """

    mesh_shape: str
    layout: str
    machine: str
    cores: int
    fits: bool
    bytes_per_core: int
    memory_per_core: int | None
    flops: float
    bytes_accessed: float
    estimate_seconds: float
    unknown_operations: int
    traffic: tuple[AxisTraffic, ...]
    link_seconds: float
    step_seconds: float
    overlapped_seconds: float
    tokens_per_second: float | None
    share_of_peak: float | None
    build_seconds: float
    compile_seconds: float
    is_repeated: bool
    unknown_names: tuple[str, ...] = ()
    loops_counted_once: int = 0
    is_of_update: bool = False
    parameters: int | None = None
    steps_per_update: int = 1
    skipped_step_seconds: float | None = None
    skipped_step_traffic: tuple[AxisTraffic, ...] = ()
    mean_step_seconds: float | None = None
    estimate_source: str = "roofline"
    roofline_seconds: float | None = None
    doubt: str = ""
    model_flops: float | None = None
    mfu: float | None = None
    dollars_per_hour: float | None = None
    tokens_per_dollar: float | None = None
    slices: int = 1
    dcn_seconds: float = 0.0
    fewer_messages: tuple[FewerMessages, ...] = ()


@dataclasses.dataclass(frozen=True)
class Refused:
    """A mesh that is not possible on a machine.

    Attributes:
      mesh_shape: the mesh shape, such as "batch:4;model:2".
      layout: the layout rules, such as "batch:batch;heads:model".
      machine: the topology, such as "v5e:4x4".
      reason: why the mesh is not possible, in one line.
    """

    mesh_shape: str
    layout: str
    machine: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of planning: the predicted cost of a training step on each mesh and machine.

    Attributes:
      rows: the possible meshes. Rows with a `PlanRow.doubt` come after all rows without one. Within
        each of these two groups, programs that fit into memory come before programs that do not.
        Rows that are alike in doubt and in fitting are sorted by the time for a token, the shortest
        first. If the number of tokens is unknown, they are sorted by the time for a step.
      refused: the meshes that are not possible, with the reasons.
      is_partial: whether planning was stopped before all meshes were planned.
      not_reached: the number of meshes that were not planned before the stop.
      stopped_by: the number of the signal that stopped the planning; None if no signal did.
    """

    rows: tuple[PlanRow, ...]
    refused: tuple[Refused, ...] = ()
    is_partial: bool = False
    not_reached: int = 0
    stopped_by: int | None = None

    def __str__(self) -> str:
        if self.rows:
            lines = [*_table(self.rows), "", *_parameter_lines(self.rows), _UNKNOWN]
        else:
            lines = ["no mesh was planned" if self.is_partial else "no mesh can be planned"]
        if any(row.mfu is not None for row in self.rows):
            lines.append(_SHARES)
        unknown = [row for row in self.rows if row.unknown_operations]
        if unknown:
            most = max(row.unknown_operations for row in unknown)
            names = sorted({name for row in unknown for name in row.unknown_names})
            lines.append(
                f"Up to {most} custom calls of a program count with their bytes alone"
                f"{' (' + ', '.join(names) + ')' if names else ''}."
            )
        lines += [
            f"Not ranked: {_name(row, True)}: the estimate is {row.doubt}."
            for row in self.rows
            if row.doubt
        ]
        if any(row.loops_counted_once for row in self.rows):
            lines.append(
                "Some loops run an unknown number of times; one iteration of them is counted."
            )
        if any(row.is_of_update for row in self.rows):
            lines.append(
                "The figures of programs with conditionals are those of a step with the update."
            )
        means = {row.steps_per_update for row in self.rows if row.skipped_step_seconds is not None}
        if max(means, default=1) > 1:
            steps = " or ".join(map(str, sorted(means)))
            lines.append(
                f'"mean ms", tokens/s, MFU and HFU are means over {steps} steps, one '
                "with the update and the others without."
            )
        lines += _lines_on_fewer_messages(self.rows)
        if self.refused:
            several = len({r.layout for r in self.rows} | {r.layout for r in self.refused}) > 1
            lines += ["", "skipped:", *_reason_lines(self.refused, several)]
        if self.is_partial:
            lines += ["", f"stopped: {self.not_reached} not looked at; the plan lacks them"]
        return "\n".join(wrapped(lines))

    def to_json(self) -> str:
        """Returns the plan as JSON text, whose keys are the names of attributes."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def plot(self, path: str) -> None:
        """Draws each row's predicted time, split into operations and links, into a PNG.

        Args:
          path: the file to write.

        Raises:
          ImportError: when matplotlib is not installed.
        """
        # Without pyplot, so that no display and no global state is touched.
        from matplotlib.figure import Figure

        several = len({row.layout for row in self.rows}) > 1
        names = [_name(row, several) for row in self.rows]
        places = range(len(names))
        height = 1.5 + 0.4 * max(1, len(names))
        figure = Figure(figsize=(9, height), layout="constrained")
        axes = figure.subplots()
        left = [0.0] * len(names)
        for label, values in _milliseconds_by_part(self.rows).items():
            axes.barh(places, values, left=left, label=label)
            left = [a + b for a, b in zip(left, values)]
        # All numbers have as many decimals as the smallest needs for three digits.
        decimals = max(0, 2 - math.floor(math.log10(min(filter(None, left), default=1.0))))
        for place, row in enumerate(self.rows):
            note = ("" if row.fits else " does not fit") + (" not ranked" if row.doubt else "")
            axes.text(left[place], place, f" {left[place]:,.{decimals}f} ms{note}", va="center")
        axes.set_yticks(places, names)
        axes.margins(y=0.4 / max(1, len(names)))
        axes.set_xlabel("predicted ms per step")
        axes.set_xlim(right=1.3 * max(left, default=1.0) or 1.0)
        axes.invert_yaxis()
        figure.legend(loc="outside upper right", ncols=3)
        figure.savefig(path, format="png", dpi=120)


def sorted_rows(rows: list[PlanRow]) -> tuple[PlanRow, ...]:
    """Returns the rows in the order of `Plan.rows`.

    Rows of programs that fit into memory come first; among them, a row with a shorter predicted
    time for a token comes earlier. Rows with a `PlanRow.doubt` come last.
    """

    def key(row: PlanRow) -> Any:
        rate = row.tokens_per_second
        step = row.step_seconds if row.mean_step_seconds is None else row.mean_step_seconds
        return (bool(row.doubt), not row.fits, step if rate is None else -rate, _name(row, True))

    return tuple(sorted(rows, key=key))


def _parameter_lines(rows: tuple[PlanRow, ...]) -> list[str]:
    """Returns the lines of a plan's text about the number of parameters: one line, or none.

    The line has several numbers if the models of rows differ, as when padding depends on the mesh.
    The list is empty if no row says how many parameters there are.
    """
    counts = sorted({row.parameters for row in rows if row.parameters is not None})
    return [f"{' or '.join(f'{n:,}' for n in counts)} parameters."] if counts else []


def _name(row: PlanRow | Refused, with_layout: bool) -> str:
    layout = f", {row.layout}," if with_layout else ""
    return f"{row.mesh_shape}{layout} on {row.machine}"


def _lines_on_fewer_messages(rows: tuple[PlanRow, ...]) -> list[str]:
    """Returns the lines of a plan's text about exchanges of TPU slices once in several steps.

    The lines are a table of the step times in `PlanRow.fewer_messages`, and a sentence for each row
    on how much of a step's time is saved. There are no lines if `PlanRow.fewer_messages` is empty
    in all rows.
    """
    table, words = [], []
    several = len({row.layout for row in rows}) > 1
    for row in rows:
        if not row.fewer_messages:
            continue
        mean = row.step_seconds if row.mean_step_seconds is None else row.mean_step_seconds
        cells = {"mesh": _name(row, several), "every step": f"{1e3 * mean:,.4g}"}
        cells["of it DCN"] = f"{1e3 * row.dcn_seconds:,.4g}"
        for one in row.fewer_messages:
            name = f"{one.way}, {one.inner_steps}"
            cells[name] = f"{1e3 * one.step_seconds:,.4g}"
        table.append(cells)
        outer = [one for one in row.fewer_messages if one.way == "OuterOptimizer"]
        least = outer[0].exchange_seconds / row.dcn_seconds if row.dcn_seconds else math.inf
        best = min(row.fewer_messages, key=lambda one: one.step_seconds)
        saved = 1 - best.step_seconds / mean
        name = _name(row, several)
        if saved < _LEAST_SAVED:
            words.append(f"  {name}: fewer messages do not pay (at most {100 * saved:.2g}%).")
        else:
            words.append(
                f"  {name}: OuterOptimizer takes less than a sum in each step from "
                f"{math.floor(least) + 1} inner steps on; {best.way} with {best.inner_steps} "
                f"saves {100 * saved:.2g}% of a step."
            )
    if not table:
        return []
    headers = list(table[0])
    return [
        "",
        "ms a step if TPU slices exchange values every few steps (by way, inner steps):",
        *text_table(headers, [[cells[name] for name in headers] for cells in table], {"mesh"}),
        *words,
        "If slices exchange values every few steps, the same tokens train a little less well than "
        "with an exchange in each step. An island's exchange costs no time if its steps from one "
        "exchange to the next take longer than the exchange: docs/plan.md.",
    ]


# If fewer messages save less than this share of a step, they are not worth their cost in loss.
_LEAST_SAVED = 0.05


def _reason_lines(refused: tuple[Refused, ...], with_layout: bool) -> list[str]:
    """Returns lines of text that give each reason once, with the meshes that are refused for it.

    `with_layout` says whether the lines name the layout of each mesh, too.
    """
    meshes: dict[str, list[str]] = {}
    for one in refused:
        meshes.setdefault(one.reason, []).append(_name(one, with_layout))
    lines = []
    for reason, names in meshes.items():
        if len(names) == 1:
            lines.append(f"  {names[0]}: {reason}")
        else:
            lines += [f"  {reason}", *(f"    {name}" for name in names)]
    return lines


def _milliseconds_by_part(rows: tuple[PlanRow, ...]) -> dict[str, list[float]]:
    """Returns the milliseconds of a step, split into operations and the links of each mesh axis.

    `rows` are the rows of a plan. The keys of the returned dictionary are labels, such as
    "operations" and "along batch", the links of the mesh axis "batch". Each value is a list: the
    milliseconds that the operations or the links take in each of `rows`.
    """
    parts = {"operations": [1e3 * row.estimate_seconds for row in rows]}
    for axis in dict.fromkeys(t.axis for row in rows for t in row.traffic):
        parts[f"along {axis}"] = [
            1e3 * sum(t.seconds for t in row.traffic if t.axis == axis) for row in rows
        ]
    return parts


def _table(rows: tuple[PlanRow, ...]) -> list[str]:
    layouts = {row.layout for row in rows}
    table: list[dict[str, str]] = []
    for row in rows:
        cells = {"mesh": row.mesh_shape, "on": row.machine}
        if len(layouts) > 1:
            cells["layout"] = row.layout
        limit = row.memory_per_core
        share = "" if limit is None else f" ({100 * row.bytes_per_core / limit:.3g}%)"
        cells["fits"] = "yes" if row.fits else "NO"
        cells["GB/core"] = f"{row.bytes_per_core / 1e9:.3g}{share}"
        cells["GFLOP"] = f"{row.flops / 1e9:,.4g}"
        cells["GB touched"] = f"{row.bytes_accessed / 1e9:,.4g}"
        cells["estimate ms"] = f"{1e3 * row.estimate_seconds:,.4g}"
        cells["by"] = row.estimate_source
        cells["links: MB, ms"] = "\n".join(
            f"{t.axis} {t.bytes_per_core / 1e6:,.3g}, {1e3 * t.seconds:,.3g}" for t in row.traffic
        )
        cells["step ms"] = f"{1e3 * row.step_seconds:,.4g}"
        cells["at best"] = f"{1e3 * row.overlapped_seconds:,.4g}"
        if row.steps_per_update > 1 and row.skipped_step_seconds is not None:
            cells["mean ms"] = f"{1e3 * (row.mean_step_seconds or 0.0):,.4g}"
        if row.tokens_per_second is not None:
            cells["tokens/s"] = f"{row.tokens_per_second:,.0f}"
        if row.mfu is not None:
            cells["MFU"] = f"{100 * row.mfu:.3g}%"
        if row.share_of_peak is not None:
            cells["HFU"] = f"{100 * row.share_of_peak:.3g}%"
        if row.tokens_per_dollar is not None:
            cells["$ / 1e9 tokens"] = f"{1e9 / row.tokens_per_dollar:,.4g}"
        elif row.dollars_per_hour is not None:
            cells["$ / hour"] = f"{row.dollars_per_hour:,.4g}"
        table.append(cells)
    left = {"mesh", "on", "layout", "fits", "by"}
    headers = list(dict.fromkeys(name for cells in table for name in cells))
    lines = [[cells.get(name, "") for name in headers] for cells in table]
    return text_table(headers, lines, left, keys=3 if len(layouts) > 1 else 2)
