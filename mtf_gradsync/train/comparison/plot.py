"""Draws a comparison of two training steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Sequence

from mtf_gradsync.simd import CommunicationReport, CommunicationRow
from mtf_gradsync.train.comparison.parts import GRADIENTS, PARTS
from mtf_gradsync.train.comparison.steps import Comparison
from mtf_gradsync.train.files import new_figure, write_figure

_COLORS = {
    "forward and backward pass": "tab:gray",
    "gradients": "tab:blue",
    "optimizer": "tab:orange",
    "transfers": "tab:green",
}
_LABELS = dict(zip(PARTS, _COLORS))


class _Bar(NamedTuple):
    """A segment of a stacked bar."""

    label: str
    conditional: bool
    runs: int
    bytes_per_core: int


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Draws bytes per core and operations of both steps, by group and by part, into a PNG file."""
    sections = [("collectives, SIMD mesh", _collectives(comparison))]
    if comparison.bare.transfers and comparison.wrapped.transfers:
        sections.append(("transfers, placement mesh", _transfers(comparison)))
    sizes = [max(1, len(bars)) for _, bars in sections]
    figure = new_figure(width=10, height=1.6 * len(sections) + 0.4 * sum(sizes))
    # After new_figure, whose error says what to install.
    from matplotlib.patches import Patch

    panels = figure.subplots(
        len(sections), 2, squeeze=False, sharey="row", gridspec_kw={"height_ratios": sizes}
    )
    for (title, bars), (left, right) in zip(sections, panels):
        _draw(left, bars, lambda bar: bar.bytes_per_core / 1e6)
        _draw(right, bars, lambda bar: bar.runs)
        left.invert_yaxis()
        left.set_title(title, loc="left", fontsize=10)
        left.set_xlabel("MB per core in an update step")
        right.set_xlabel("runs in an update step")
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


def _collectives(comparison: Comparison) -> dict[str, list[_Bar]]:
    """Returns a stacked bar for each group and step, both steps of a group side by side."""
    steps = {"bare": comparison.bare, "wrapped": comparison.wrapped}
    groups = dict.fromkeys(g for step in steps.values() for g in step.collectives.by_group())
    return {
        f"{group}, {title}": [
            bar
            for part in (GRADIENTS, *(p for p in PARTS if p != GRADIENTS))
            for bar in _bars(
                _LABELS[part], [r for r in step.of_part(part).rows if r.group == group]
            )
        ]
        for group in groups
        for title, step in steps.items()
    }


def _transfers(comparison: Comparison) -> dict[str, list[_Bar]]:
    reports = {"bare": comparison.bare.transfers, "wrapped": comparison.wrapped.transfers}
    groups = dict.fromkeys(g for report in reports.values() if report for g in report.by_group())
    return {
        f"{group}, {title}": _bars("transfers", [r for r in report.rows if r.group == group])
        for group in groups
        for title, report in reports.items()
        if report
    }


def _bars(label: str, rows: Sequence[CommunicationRow]) -> list[_Bar]:
    bars = []
    for conditional in (False, True):
        chosen = tuple(row for row in rows if row.is_conditional is conditional)
        total = CommunicationReport(chosen).update_step
        bars.append(_Bar(label, conditional, total.runs, total.bytes_per_core))
    return bars


def _draw(panel: Any, bars: dict[str, list[_Bar]], value: Any) -> None:
    for name, pieces in bars.items():
        start = 0.0
        for piece in pieces:
            width = value(piece)
            panel.barh(
                name,
                width,
                left=start,
                color=_COLORS[piece.label],
                hatch="///" if piece.conditional else None,
                edgecolor="white" if piece.conditional else "none",
            )
            start += width
    panel.grid(axis="x", alpha=0.3)
