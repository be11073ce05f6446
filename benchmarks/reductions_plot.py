"""The picture of the table of reductions: a line a strategy, a mark a profile."""

from __future__ import annotations

from typing import Any

_MARKS = "osD^v<>"


def plot(axes: Any, rows: list[dict[str, Any]], base: str, about: dict[str, str]) -> None:
    """Draws times relative to `base` on the most devices, with quartiles, on a log scale.

    The legend says of each profile what `about` has.
    """
    devices = max(row["devices"] for row in rows)
    rows = [row for row in rows if row["devices"] == devices]
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    profiles = list(dict.fromkeys(row["profile"] for row in rows))
    for number, profile in enumerate(profiles):
        some = {row["strategy"]: row["time/ring"] for row in rows if row["profile"] == profile}
        ratios = [some[name] for name in names]
        # A little apart, so that marks of equal times can be told.
        places = [i + 0.16 * (number - (len(profiles) - 1) / 2) for i in range(len(names))]
        axes.errorbar(
            [r.median for r in ratios],
            places,
            xerr=[[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]],
            fmt=_MARKS[number % len(_MARKS)],
            markersize=4,
            linewidth=1,
            label=f"{profile}: {about[profile]}",
        )
    axes.axvline(1.0, color="0.6", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)))
    axes.set_yticklabels(names, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(f"time over {base}, {devices} CPU devices of one process")
    axes.legend(title="gradients of a processor", fontsize=8, title_fontsize=8)
