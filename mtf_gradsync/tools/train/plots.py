"""The plots of a run's page."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.tools.islands.journal import Status, plot_status
from mtf_gradsync.tools.train import figures
from mtf_gradsync.tools.train.traffic import Traffic

# More points than these cannot be distinguished in a plot, and make a large page.
_MOST_POINTS = 400


class Series(NamedTuple):
    """Measurements at steps ``[points]``: values ``[points]``, or ``[points, shards]``.

    A point is the mean of `steps_per_point` logged steps.
    """

    steps: np.ndarray
    values: np.ndarray
    steps_per_point: int = 1

    @property
    def last(self) -> Any:
        """The newest value, or the newest for each shard."""
        return self.values[-1]


def series_of(rows: Sequence[dict[str, Any]], name: str) -> Series | None:
    """Returns the values that lines of a metrics file have under a name; None without a finite one.

    Where the number of shards has changed, lines with the newest number are used.
    """
    found = [(row["step"], np.asarray(row[name], float)) for row in rows if name in row]
    found = [(step, value) for step, value in found if np.all(np.isfinite(value))]
    if not found:
        return None
    shape = found[-1][1].shape
    found = [(step, value) for step, value in found if value.shape == shape]
    return Series(np.array([s for s, _ in found]), np.stack([v for _, v in found]))


def thinned(series: Series, is_count: bool = False) -> Series:
    """Returns a series with fewer points: means of neighbours, or every n-th of a count."""
    size = -(-len(series.steps) // _MOST_POINTS)
    if size == 1:
        return series
    ends = np.append(np.arange(size, len(series.steps), size), len(series.steps))
    steps = series.steps[ends - 1]
    if is_count:
        return Series(steps, series.values[ends - 1], 1)
    starts = np.append(0, ends[:-1])
    values = np.add.reduceat(series.values, starts) / (ends - starts).reshape(
        [-1] + [1] * (series.values.ndim - 1)
    )
    return Series(steps, values, size)


Rows = Sequence[Any]
# If there are more shards than colors, their range is drawn.
_SERIES = figures.SERIES
_MOST_LINES = len(_SERIES)
# From this ratio on small values would lie on the axis, so the axis is logarithmic.
_LOG_RATIO = 20
_MOST_BARS = 12
# A bar that is a smaller fraction of the longest one would be invisible.
_SHORTEST_BAR = 0.01


class Plot(NamedTuple):
    """A plot, as an ``svg`` element with a description of what it shows, and its texts.

    `wide` is the same, as wide as two columns; "" where it is not needed.
    """

    title: str
    svg: str
    caption: str
    wide: str = ""


class _Line(NamedTuple):
    label: str
    series: Series | None
    is_points: bool = False


def draw_plots(rows: Rows, unigram_nats: float | None) -> list[Plot]:
    """Draws the plots for which a metrics file's lines have data.

    unigram_nats is a horizontal line beside the losses.
    """
    others = [
        _over_steps(
            "Speed",
            "tokens per second",
            [_Line("training", series_of(rows, "tokens_per_second"))],
            "Over the last seconds of training, without checkpoints and evaluations.",
            from_zero=True,
        ),
        _over_steps(
            "Learning rate",
            "learning rate",
            [_Line("learning rate", series_of(rows, "learning_rate"))],
            "As the optimizer was given it.",
            from_zero=True,
        ),
        _over_steps(
            "Norm of the gradient",
            "norm",
            [
                _Line("before clipping", series_of(rows, "gradient_norm/before_clipping")),
                _Line("applied", series_of(rows, "gradient_norm/applied")),
            ],
            "Of all gradients together, summed over the mesh. Where several micro steps make an "
            "update: of the newest update.",
        ),
        _by_shard(rows, "Norms of the shards' gradients", "gradient_norm/of_shards", "norm",
            "What each shard adds to the sum, before anything is clipped: for a mean over the "
            "batch, its own gradient divided by the number of shards."),
        _by_shard(rows, "Norms of the shards' gradients, clipped",
            "gradient_norm/of_shards_clipped", "norm", "After each shard was clipped by its own "
            "norm."),
        _over_steps(
            "Gradient noise scale",
            "sequences",
            [_Line("noise scale", series_of(rows, "gradient_noise_scale"))],
            "About the batch size from which on a larger batch saves few steps; smoothed.",
        ),
        _over_steps(
            "Loss scale",
            "factor",
            [_Line("loss scale", series_of(rows, "loss_scale/scale"))],
            "What the loss is multiplied by before gradients are computed.",
        ),
        _over_steps(
            "Micro steps skipped",
            "micro steps so far",
            [_Line("skipped", series_of(rows, "accumulation/skipped"))],
            "By should_skip_update_fn of GradientAccumulationOptimizer.",
            from_zero=True,
            is_count=True,
        ),
        _over_steps(
            "Steps skipped",
            "steps so far",
            [_Line("skipped", series_of(rows, "loss_scale/skipped"))],
            "By LossScaleOptimizer: a gradient was not finite.",
            from_zero=True,
            is_count=True,
        ),
        _by_shard(rows, "Steps without a contribution", "sync_replicas/dropped", "steps so far",
            "Replicas whose gradient was stale, not finite or masked, counted by replica.",
            is_count=True),
    ]  # fmt: skip
    present = [plot for plot in others if plot]
    # With it all columns are full.
    is_wide = len(present) % 2 == 0
    loss = _over_steps("Loss", _LOSS_UNIT, _losses(rows),
        "Cross entropy of the training batches, a mean over the steps since the last point, and of "
        "held-out text.", level=unigram_nats,
        is_wide=is_wide)  # fmt: skip
    return [loss, *present] if loss else present


_LOSS_UNIT = "nats per token"


def training_losses(rows: Rows) -> Series | None:
    """Returns the training losses of a metrics file, in the unit of held-out losses.

    Of a file that was written before there were such, the model's own losses: means over positions.
    """
    return series_of(rows, "nats_per_token") or series_of(rows, "loss")


def _losses(rows: Rows) -> list[_Line]:
    return [
        _Line("training", training_losses(rows)),
        _Line("held out", series_of(rows, "held_out_nats"), is_points=True),
    ]


def kilobytes(size: int) -> str:
    """Returns a number of bytes in units of 1,000, exactly."""
    return f"{size / 1e3:,.3f}"


def draw_islands(status: Status) -> Plot | None:
    """Draws a row for each island over time; None where none has joined."""
    if not status.rows:
        return None
    with figures.style():
        figure = figures.figure(1.3 + 0.3 * len(status.rows))
        plot_status(status, figure.add_subplot(), _SERIES)
        words = "; ".join(
            f"{row.island}: {row.contributed} contributions, {row.merged} merged, {row.late} late"
            for row in status.rows
        )
        drawn = figures.as_svg(figure, "islands", f"A row for each island over time. {words}.")
    caption = f"When each was there, and what became of its work, until version {status.version}."
    return Plot("Islands", drawn, caption)


def draw_traffic(traffic: Traffic) -> Plot | None:
    """Draws the mesh traffic of an update step; None where there is none."""
    present = [row for row in traffic.rows if row.bytes_per_core]
    if not present:
        return None
    shortest = _SHORTEST_BAR * max(row.bytes_per_core for row in present)
    rows = [row for row in present if row.bytes_per_core >= shortest][:_MOST_BARS]
    caption = "The table has the same numbers."
    undrawn = sum(row.bytes_per_core for row in present) - sum(r.bytes_per_core for r in rows)
    if undrawn:
        caption += f" It also has what is too little for a bar, {kilobytes(undrawn)} kB in all."
    parts = list(dict.fromkeys(row.part or row.operation for row in rows))
    with figures.style():
        figure = figures.figure(1.1 + 0.32 * len(rows))
        axes = figure.add_subplot()
        for index, row in enumerate(rows):
            color = _SERIES[parts.index(row.part or row.operation) % _MOST_LINES]
            axes.barh(index, row.bytes_per_core / 1e3, color=color, height=0.7)
        axes.set_yticks(range(len(rows)), [f"{r.operation}\n{r.group}" for r in rows], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("kB for each core in an update step")
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        if len(parts) > 1 or parts[0] != rows[0].operation:
            from matplotlib.patches import Patch

            handles = [Patch(color=c, label=p) for p, c in zip(parts, _SERIES)]
            figure.legend(handles=handles, loc="outside upper right", fontsize=8, ncols=len(parts))
        listed = "; ".join(
            f"{r.operation} over {r.group}{' for ' + r.part if r.part else ''}: "
            f"{kilobytes(r.bytes_per_core)} kB" for r in rows
        )  # fmt: skip
        drawn = figures.as_svg(figure, "traffic", f"Bars of kB for each core. {listed}.")
    return Plot("Bytes by kind and mesh axis", drawn, caption)


def _over_steps(
    title: str,
    unit: str,
    lines: Sequence[_Line],
    caption: str,
    level: float | None = None,
    from_zero: bool = False,
    is_count: bool = False,
    is_wide: bool = False,
) -> Plot | None:
    present = [(line.label, line.series) for line in lines if line.series is not None]
    if not present:
        return None

    def draw(axes: Any) -> None:
        _draw_lines(axes, lines, level, is_count)
        if is_count:
            _count_from_zero(axes, present[0][1])
        elif from_zero:
            axes.set_ylim(bottom=0)

    values = [series for _, series in present]
    words = "; ".join(f"{label}: {_in_words(series)}" for label, series in present)
    if level is not None:
        words += f"; unigram baseline: {_short(level)}"
    caption += _of_means([thinned(s, is_count) for s in values])
    svg = _to_svg(title, unit, draw, values, words, not from_zero)
    wide = _to_svg(title, unit, draw, values, words, not from_zero, is_wide) if is_wide else ""
    return Plot(title, svg, caption, wide)


def _draw_lines(
    axes: Any,
    lines: Sequence[_Line],
    level: float | None,
    is_count: bool = False,
) -> None:
    for color, line in zip(_SERIES, lines):
        if line.series is None:
            continue
        points = line.series if line.is_points else thinned(line.series, is_count)
        form: dict[str, Any] = (
            {"marker": "o", "linestyle": "none"} if line.is_points else {"linewidth": 1.3}
        )
        if len(points.steps) == 1:
            form = {"marker": "o"}
        axes.plot(points.steps, points.values, color=color, label=line.label, **form)
    if level is not None:
        axes.axhline(
            level, color=figures.INK, linestyle="--", linewidth=1, label="unigram baseline"
        )
    if len(axes.get_lines()) > 1:
        axes.legend(fontsize=8)


def _by_shard(
    rows: Rows, title: str, name: str, unit: str, caption: str, is_count: bool = False
) -> Plot | None:
    series = series_of(rows, name)
    if series is None or series.values.ndim != 2:
        return None
    points = thinned(series, is_count)
    shards = series.values.shape[1]

    def draw(axes: Any) -> None:
        style = {"marker": "o"} if len(points.steps) == 1 else {"linewidth": 1.2}
        if shards <= _MOST_LINES:
            for shard in range(shards):
                axes.plot(points.steps, points.values[:, shard], color=_SERIES[shard],
                    label=f"shard {shard}", **style)  # fmt: skip
        else:
            low, high = points.values.min(axis=1), points.values.max(axis=1)
            axes.fill_between(points.steps, low, high, color=_SERIES[0], alpha=0.3,
                linewidth=0, label=f"range of {shards} shards")  # fmt: skip
            middle = np.median(points.values, axis=1)
            axes.plot(points.steps, middle, color=_SERIES[0], label="median", **style)
        axes.legend(fontsize=8, ncols=2)
        if is_count:
            _count_from_zero(axes, series)

    newest = ", ".join(f"shard {n} {_short(x)}" for n, x in enumerate(series.last[:_MOST_LINES]))
    low, high = int(np.argmin(series.last)), int(np.argmax(series.last))
    words = f"{shards} shards from step {series.steps[0]} to {series.steps[-1]}; at the end "
    if shards <= _MOST_LINES:
        words += newest
    else:
        words += f"from {_short(series.last[low])} (shard {low}) to "
        words += f"{_short(series.last[high])} (shard {high})"
    caption += _of_means([points])
    return Plot(title, _to_svg(title, unit, draw, [series], words, not is_count), caption)


def _to_svg(
    title: str,
    unit: str,
    draw: Callable[[Any], None],
    values: Sequence[Series],
    words: str,
    may_be_log: bool,
    is_wide: bool = False,
) -> str:
    with figures.style():
        width = 2 * figures.WIDTH + 0.3 if is_wide else figures.WIDTH
        figure = figures.figure(width=width)
        axes = figure.add_subplot()
        draw(axes)
        _finish(axes, unit, values, may_be_log)
        prefix = "".join(c if c.isalnum() else "-" for c in title.lower())
        prefix += "-wide" if is_wide else ""
        return figures.as_svg(figure, prefix, f"{title} over steps. {words}.")


def _finish(axes: Any, unit: str, values: Sequence[Series], may_be_log: bool) -> None:
    axes.grid()
    axes.set_axisbelow(True)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if values:
        lowest = min(s.values.min() for s in values)
        highest = max(s.values.max() for s in values)
        if may_be_log and lowest > 0 and highest > _LOG_RATIO * lowest:
            _use_log(axes)


def _count_from_zero(axes: Any, series: Series) -> None:
    axes.set_ylim(0, max(1.0, 1.05 * series.values.max()))
    axes.yaxis.get_major_locator().set_params(integer=True)


def _use_log(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _in_words(series: Series) -> str:
    first, last = series.values[0], series.values[-1]
    if len(series.steps) == 1:
        return f"{_short(last)} at step {series.steps[0]}"
    return (
        f"{_short(first)} at step {series.steps[0]}, {_short(last)} at step {series.steps[-1]}, "
        f"between {_short(series.values.min())} and {_short(series.values.max())}"
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _of_means(series: Sequence[Series]) -> str:
    most = max(s.steps_per_point for s in series)
    return f" Each point is the mean of {most} that were logged." if most > 1 else ""
