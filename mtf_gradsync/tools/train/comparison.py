"""Builds a config's training step with and without wrappers, and lists what each exchanges."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, NamedTuple

from mtf_gradsync.extension import Description, Wrapper, describe, tf
from mtf_gradsync.runtimes import simd
from mtf_gradsync.runtimes._tables import text_table
from mtf_gradsync.runtimes.sessions import OnDevices
from mtf_gradsync.runtimes.simd import CommunicationReport, Total
from mtf_gradsync.runtimes.simd.communication import table_of
from mtf_gradsync.tools.train.figures import new_figure, write_figure
from mtf_gradsync.tools.train.model import TrainingJob
from mtf_gradsync.tools.train.traffic import GRADIENTS, PARTS, part_of_each_collective
from mtf_gradsync.tools.train.train_graph import build_simd, build_train_graph


class ComparedStep(NamedTuple):
    """The communication of a training step.

    Attributes:
      optimizers: class names of the optimizers, outermost first.
      description: what the optimizers do in a step (`mtf_gradsync.describe`).
      collectives: the collectives of the SIMD program.
      part: the part of the step, one of `PARTS`, of each row of `collectives`, by the row's name.
      transfers: copies between the devices of a placement mesh; None if they were not listed.
    """

    optimizers: tuple[str, ...]
    description: Description
    collectives: simd.CommunicationReport
    part: dict[str, str]
    transfers: simd.CommunicationReport | None

    def of_part(self, part: str) -> simd.CommunicationReport:
        """Returns the collectives of a part of the step, such as the gradients: one of `PARTS`."""
        rows = tuple(row for row in self.collectives.rows if self.part[row.name] == part)
        return simd.CommunicationReport(rows, self.collectives.mesh)


class WrapperComparison(NamedTuple):
    """Two steps on the same mesh: one with the innermost optimizer alone, one with the config's.

    If the config's optimizer is no wrapper, `bare` and `wrapped` are the same object.
    """

    mesh: str
    bare: ComparedStep
    wrapped: ComparedStep

    @property
    def steps(self) -> dict[str, ComparedStep]:
        """The two steps by their titles, "bare" and "wrapped"."""
        return {"bare": self.bare, "wrapped": self.wrapped}

    def to_json(self) -> str:
        """Returns both steps with all rows and totals, as JSON text."""
        content: dict[str, Any] = {"mesh": self.mesh}
        for name, step in self.steps.items():
            collectives = json.loads(step.collectives.to_json())
            for row in collectives["rows"]:
                row["part"] = step.part[row["name"]]
            collectives["totals"]["by_part"] = {
                part: dataclasses.asdict(step.of_part(part).update_step) for part in PARTS
            }
            transfers = None if step.transfers is None else json.loads(step.transfers.to_json())
            content[name] = {
                "optimizers": list(step.optimizers),
                "does": json.loads(step.description.to_json()),
                "collectives": collectives,
                "transfers": transfers,
            }
        return json.dumps(content, indent=2)


def compare_with_bare(
    job: TrainingJob, with_transfers: bool = True, on_step_built: Callable[[], Any] = lambda: None
) -> WrapperComparison:
    """Builds a job's training step with and without wrappers, and lists what each exchanges.

    Nothing is trained and no data is read. With `with_transfers` both training steps are also built
    on a placement mesh, to list the copies between devices; a graph on a placement mesh grows with
    the number of devices. `on_step_built` is called, without arguments, after each of the two steps
    was built.
    """
    # First, so that an error in the config names the config's own optimizer.
    wrapped, is_wrapped = _build_and_list(job, with_transfers)
    on_step_built()
    bare = wrapped
    if is_wrapped:
        bare, _ = _build_and_list(
            job._replace(optimizer=innermost_of(job.optimizer)), with_transfers
        )
    on_step_built()
    return WrapperComparison(wrapped.collectives.mesh, bare, wrapped)


def innermost_of(optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that makes the innermost optimizer of a stack alone.

    `optimizer` is called with ``learning_rate=`` and returns the whole stack. The returned function
    is called with a learning rate, too, and returns the innermost optimizer.
    """

    def make(learning_rate: Any) -> Any:
        made = optimizer(learning_rate=learning_rate)
        return made.innermost() if isinstance(made, Wrapper) else made

    return make


def _build_and_list(job: TrainingJob, with_transfers: bool) -> tuple[ComparedStep, bool]:
    """Builds a job's training step; returns what it exchanges, and whether it has a wrapper.

    `with_transfers` is whether to list the copies between the devices of a placement mesh, too.
    """
    with tf.Graph().as_default():
        graph, program = build_simd(job)
        description = describe(graph.optimizers[0])
        collectives = simd.list_collectives(program, lowering=graph.lowering)
    step = ComparedStep(
        optimizers=tuple(type(opt).__name__ for opt in graph.optimizers),
        description=description,
        collectives=collectives,
        part=part_of_each_collective(graph, collectives),
        transfers=_list_transfers(job) if with_transfers else None,
    )
    return step, isinstance(graph.optimizers[0], Wrapper)


def _list_transfers(job: TrainingJob) -> simd.CommunicationReport:
    mesh = job.model.mesh
    # Not the config's devices, which may all be the same: copies do not depend on them.
    devices = [f"/device:CPU:{core}" for core in range(mesh.shape.size)]
    model = job.model._replace(mesh=mesh._replace(devices=devices))
    with tf.Graph().as_default():
        graph = build_train_graph(OnDevices(), job._replace(model=model))
        (mesh_impl,) = graph.lowering.mesh_to_impl.values()
        return simd.list_transfers([graph.loss, graph.step], mesh_impl)


_WIDTH = 80
_COLORS = {
    "forward and backward pass": "tab:gray",
    "gradients": "tab:blue",
    "optimizer": "tab:orange",
    "transfers": "tab:green",
}
_PART_LABELS = dict(zip(PARTS, _COLORS))
_NOTHING = Total(operations=0, groups=0, runs=0, bytes_per_core=0, is_exact=True)


def as_text(comparison: WrapperComparison, rows: bool = False) -> str:
    """Returns, as text, tables of what the bare step and the step with wrappers exchange.

    The text has the totals of both steps, and a table of the collectives that sum gradients in the
    step with wrappers. If `rows` is True, the text has tables of all collectives and transfers of
    both steps in place of that table. The text is no wider than a terminal.
    """
    steps, wrapped = comparison.steps, comparison.wrapped
    head = [f"mesh {comparison.mesh}"]
    head += [f"{title:8} {' > '.join(step.optimizers)}" for title, step in steps.items()]
    if comparison.bare is wrapped:
        head.append("The optimizer of this config has no wrapper, so both steps are the same.")
    blocks = ["\n".join(head)]
    blocks += ["What the optimizer does", wrapped.description.as_text(_WIDTH)]
    parts = {
        label: {title: step.of_part(part).update_step for title, step in steps.items()}
        for part, label in _PART_LABELS.items()
    }
    collectives = {title: step.collectives for title, step in steps.items()}
    blocks += ["Collectives of the SIMD (TPU) program in one step"]
    blocks += [_totals_table(collectives, parts)]
    transfers = {title: step.transfers for title, step in steps.items() if step.transfers}
    if len(transfers) == len(steps):
        blocks += ["Transfers between the devices of a placement mesh in one step"]
        blocks += [_totals_table(transfers, {})]
    blocks += [
        '"ops" counts collectives or transfers. "groups" counts those that are made\n'
        'together, and that the compilers of TPUs and GPUs combine, as one. "bytes" is\n'
        'what one core puts into collectives, or a device receives, on average. "share"\n'
        "is the share of the bytes of an update step, which takes every branch."
    ]
    if rows:
        for title, step in steps.items():
            listed = table_of(step.collectives.rows, step.part)
            blocks += [f"All collectives, {title}", "\n".join(listed)]
        for title, report in transfers.items():
            blocks += [f"All transfers, {title}", "\n".join(table_of(report.rows))]
    else:
        sums = wrapped.of_part(GRADIENTS)
        blocks += [f"Collectives that sum gradients, wrapped: {sums.update_step.counts}"]
        blocks += ["\n".join(table_of(sums.rows))]
    return "\n\n".join(blocks)


def _totals_table(
    reports: Mapping[str, CommunicationReport], parts: Mapping[str, Mapping[str, Total]]
) -> str:
    """Returns a table of totals as text: under each label a line for each of the two steps.

    `reports` has the title of each step, and what the step exchanges. The labels are of the totals
    of each step, of branches, and of an update step, of each of `parts`, and of each group of mesh
    axes. `parts` has totals by label and by title.
    """
    groups = {title: report.by_group() for title, report in reports.items()}
    totals: dict[str, Mapping[str, Total]] = {
        "every step": {title: report.every_step for title, report in reports.items()}
    }
    if any(report.conditional.operations for report in reports.values()):
        totals["in branches"] = {title: report.conditional for title, report in reports.items()}
        totals["update step"] = {title: report.update_step for title, report in reports.items()}
    totals.update((f"- {label}", by_title) for label, by_title in parts.items())
    for group in dict.fromkeys(group for side in groups.values() for group in side):
        totals[f"- over {group}"] = {t: side.get(group, _NOTHING) for t, side in groups.items()}
    lines = []
    for label, by_title in totals.items():
        for number, (title, total) in enumerate(by_title.items()):
            whole = reports[title].update_step.bytes_per_core
            about = "" if total.is_exact else ">="
            lines.append(
                [
                    "" if number else label,
                    title,
                    f"{total.operations:,}",
                    f"{total.groups:,}",
                    f"{about}{total.runs:,}",
                    f"{about}{total.bytes_per_core:,}",
                    f"{total.bytes_per_core / whole:.0%}" if whole else "-",
                ]
            )
    headers = ["", "", "ops", "groups", "runs", "bytes", "share"]
    if all(line[2] == line[4] for line in lines):
        headers, lines = [h for h in headers if h != "runs"], [x[:4] + x[5:] for x in lines]
    return "\n".join(text_table(headers, lines, text=[""]))


def plot_comparison(comparison: WrapperComparison, path: Path) -> None:
    """Draws the communication of both steps into a PNG file.

    For each group of mesh axes and each part of the step, the picture shows the bytes per core and
    the number of collectives. A group of sums counts as one collective.
    """
    steps = comparison.steps
    parts = (GRADIENTS, *(part for part in PARTS if part != GRADIENTS))
    sections: dict[str, dict[str, dict[str, CommunicationReport]]] = {
        "collectives, SIMD mesh": {
            title: {_PART_LABELS[part]: step.of_part(part) for part in parts}
            for title, step in steps.items()
        }
    }
    groups = [[group for step in steps.values() for group in step.collectives.by_group()]]
    transfers = {title: step.transfers for title, step in steps.items() if step.transfers}
    if len(transfers) == len(steps):
        sections["transfers, placement mesh"] = {
            title: {"transfers": report} for title, report in transfers.items()
        }
        groups.append([group for report in transfers.values() for group in report.by_group()])
    axes = [list(dict.fromkeys(some)) for some in groups]
    sizes = [max(1, len(steps) * len(some)) for some in axes]
    figure = new_figure(width=10, height=1.6 * len(sections) + 0.4 * sum(sizes))
    # After new_figure, whose error says what to install.
    from matplotlib.patches import Patch

    panels = figure.subplots(
        len(sections), 2, squeeze=False, sharey="row", gridspec_kw={"height_ratios": sizes}
    )
    for (title, sides), some, (left, right) in zip(sections.items(), axes, panels):
        _draw(left, some, sides, lambda total: total.bytes_per_core / 1e3)
        _draw(right, some, sides, lambda total: total.groups)
        left.invert_yaxis()
        left.set_title(title, loc="left", fontsize=10)
        left.set_xlabel("kB per core in an update step")
        right.set_xlabel("groups of operations in an update step")
    labels = [label for label in _COLORS if label != "transfers" or len(sections) > 1]
    handles = [Patch(color=_COLORS[label], label=label) for label in labels]
    handles.append(Patch(facecolor="white", edgecolor="black", hatch="///", label="in a branch"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9)
    figure.suptitle(
        f"mesh {comparison.mesh}; bare: {comparison.bare.optimizers[-1]}; wrapped: "
        f"{' > '.join(comparison.wrapped.optimizers)}",
        fontsize=10,
    )
    write_figure(path, figure)


def _draw(
    panel: Any,
    axes: Iterable[str],
    sides: Mapping[str, Mapping[str, CommunicationReport]],
    value: Callable[[Total], float],
) -> None:
    """Draws a stacked bar for each step over each of `axes`, mesh axes or groups of mesh axes.

    `sides` has, for the title of each step, a dictionary from kinds, such as "gradients", to
    reports of the step's collectives of that kind. The kinds are the keys of `_COLORS`. `value`
    returns the length of the piece that stands for a total.
    """
    for axis in axes:
        for title, side in sides.items():
            start = 0.0
            for label, report in side.items():
                found = CommunicationReport(tuple(r for r in report.rows if r.group == axis))
                pieces = ((found.every_step, "none", None), (found.conditional, "white", "///"))
                for total, edge, hatch in pieces:
                    form = {"color": _COLORS[label], "edgecolor": edge, "hatch": hatch}
                    panel.barh(f"{axis}, {title}", value(total), left=start, **form)
                    start += value(total)
    panel.grid(axis="x", alpha=0.3)
