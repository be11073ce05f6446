"""Draws the loss curve of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtf_gradsync.train.files import new_figure, write_figure


def plot_losses(
    rows: list[dict[str, Any]],
    path: Path,
    unigram_nats: float | None = None,
    title: str = "",
) -> None:
    """Draws the metrics file's training loss and held-out points into a PNG file."""
    figure = new_figure(width=7, height=4)
    axes = figure.add_subplot()
    train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    held_out = [(row["step"], row["held_out_nats"]) for row in rows if "held_out_nats" in row]
    if train:
        axes.plot(*zip(*train), color="tab:blue", linewidth=1, label="training loss")
    if held_out:
        axes.plot(
            *zip(*held_out), color="tab:orange", marker="o", linestyle="none", label="held out"
        )
    if unigram_nats is not None:
        axes.axhline(unigram_nats, color="gray", linestyle="--", label="unigram baseline")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    write_figure(path, figure)
