"""Draws docs/images/gradient_flow.png: python docs/draw_gradient_flow.py."""

from __future__ import annotations

import pathlib
from typing import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

OUT = pathlib.Path(__file__).parent / "images" / "gradient_flow.png"

INK, FAINT = "#22303c", "#6b7a88"
# One hue for values of single shards, one for values that are reduced over all of them.
SHARD_FILL, SHARD_EDGE = "#e3eefb", "#3a7bbf"
WHOLE_FILL, WHOLE_EDGE = "#e6f4ea", "#3b8f5a"
MESH_FILL, MESH_EDGE = "#fdf0dc", "#c98420"
SHARDS = 4
ROW = 0.62


def box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str,
    fill: str,
    edge: str,
    size: float = 9.5,
) -> None:
    """A rounded box with text in it, by its lower left corner."""
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.09",
            facecolor=fill,
            edgecolor=edge,
            linewidth=1.3,
        )
    )
    axes.text(
        x + width / 2,
        y + height / 2,
        text,
        ha="center",
        va="center",
        fontsize=size,
        color=INK,
        linespacing=1.35,
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """An arrow between two points."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=11,
            color=FAINT,
            linewidth=1.2,
            shrinkA=0,
            shrinkB=0,
        )
    )


def rows() -> list[float]:
    """Lower edges of the shards' rows, first shard on top."""
    return [1.35 + ROW * (SHARDS - 1 - i) for i in range(SHARDS)]


def column(axes: Axes, x: float, width: float, texts: Sequence[str]) -> None:
    """One box for each shard."""
    for y, text in zip(rows(), texts):
        box(axes, x, y, width, 0.46, text, SHARD_FILL, SHARD_EDGE)


def heading(axes: Axes, x: float, text: str, below: str) -> None:
    """A stage's name above its column, and what happens there below it."""
    axes.text(x, 3.87, text, ha="center", va="bottom", fontsize=10.5, weight="bold", color=INK)
    axes.text(x, 1.12, below, ha="center", va="top", fontsize=8.6, color=FAINT, linespacing=1.4)


def draw(axes: Axes) -> None:
    """The whole picture, in a coordinate system of 14.75 by 4.4."""
    top = rows()[0] + 0.46
    bottom = rows()[-1]
    middle = (top + bottom) / 2
    subs = "₀₁₂₃"
    number = list(range(SHARDS))

    column(axes, 0.2, 1.2, [f"loss{subs[i]}" for i in number])
    column(axes, 2.15, 1.7, [f"g{subs[i]} of every variable" for i in number])
    column(axes, 4.6, 1.55, [f"clip or check g{subs[i]}" for i in number])
    for y in rows():
        arrow(axes, (1.45, y + 0.23), (2.1, y + 0.23))
        arrow(axes, (3.9, y + 0.23), (4.55, y + 0.23))
        arrow(axes, (6.2, y + 0.23), (6.85, y + 0.23))
    heading(axes, 0.8, "loss", "each shard's part\nof the batch")
    heading(axes, 3.0, "pending", "partial sums stay where\nthey are: no traffic")
    heading(axes, 5.37, "per shard", "optional; by the\nshard's own values")

    box(axes, 6.9, bottom, 1.75, top - bottom, "", MESH_FILL, MESH_EDGE)
    for label, place in [("bucket 1", 1), ("bucket 2", 0), ("…", -1)]:
        box(axes, 7.1, middle - 0.23 + 0.68 * place, 1.35, 0.46, label, "#ffffff", MESH_EDGE)
    heading(axes, 7.77, "reduce", "gradients are reduced\nby the strategy")

    arrow(axes, (8.7, middle), (9.3, middle))
    box(axes, 9.35, middle - 0.45, 1.3, 0.9, "Adam,\nAdafactor, …", WHOLE_FILL, WHOLE_EDGE)
    heading(axes, 10.0, "inner optimizer", "receives the\nreduced gradients")

    arrow(axes, (10.7, middle), (11.3, middle))
    box(
        axes,
        11.35,
        middle - 0.45,
        1.2,
        0.9,
        "wait for all\ngradients\nand reads",
        WHOLE_FILL,
        WHOLE_EDGE,
        8.6,
    )
    heading(axes, 11.95, "gate", "no write before\nthe last read")

    arrow(axes, (12.6, middle), (13.2, middle))
    box(axes, 13.25, middle - 0.45, 1.3, 0.9, "variables\nand slots", WHOLE_FILL, WHOLE_EDGE)
    heading(axes, 13.9, "assign", "every processor\nwrites its slice")

    # The way back: the next step reads what was assigned, each variable once.
    back = 0.22
    axes.plot(
        [13.9, 13.9, 0.8, 0.8],
        [0.5, back, back, 0.42],
        color=FAINT,
        linewidth=1.2,
        linestyle=(0, (4, 3)),
    )
    arrow(axes, (0.8, 0.42), (0.8, 0.52))
    axes.text(
        7.3,
        back,
        "next step: every variable is read once",
        ha="center",
        va="center",
        fontsize=8.6,
        color=FAINT,
        backgroundcolor="#ffffff",
    )


def main() -> None:
    """Writes the picture."""
    figure = Figure(figsize=(14.75 * 0.82, 4.4 * 0.82), facecolor="#ffffff")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 14.75)
    axes.set_ylim(0, 4.4)
    axes.set_aspect("equal")
    axes.axis("off")
    draw(axes)
    OUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUT, dpi=160, metadata={"Software": None})


if __name__ == "__main__":
    main()
