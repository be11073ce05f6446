"""The plots of a run's page."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.tools.islands.journal import Status, plot_status
from mtf_gradsync.tools.train import figures
from mtf_gradsync.tools.train.traffic import Traffic

# More points than these cannot be distinguished in a plot, and make a large page.
_MOST_POINTS = 400


class Series(NamedTuple):
    """A measurement over the steps of a run, as the points of a curve.

    `steps` has the step number of each point, ``[points]``. `values` has the value of each point,
    ``[points]``, or ``[points, shards]`` if each shard is measured. If `steps_per_point` is above
    1, a point stands for this number of logged steps: it has the number of the last of these steps,
    and the mean of their values.
    """

    steps: np.ndarray
    values: np.ndarray
    steps_per_point: int = 1

    @property
    def last(self) -> Any:
        """The newest value, or the newest values of all shards."""
        return self.values[-1]


def series_of(rows: Sequence[dict[str, Any]], name: str) -> Series | None:
    """Returns a measurement from the lines of a metrics file; None if no value of it is finite.

    `rows` are the lines of the metrics file. Lines without the measurement `name`, or with a value
    of it that is not finite, are left out. If the number of shards has changed during the run, only
    the lines with the newest number of shards are used.
    """
    found = [(row["step"], np.asarray(row[name], float)) for row in rows if name in row]
    found = [(step, value) for step, value in found if np.all(np.isfinite(value))]
    if not found:
        return None
    shape = found[-1][1].shape
    found = [(step, value) for step, value in found if value.shape == shape]
    return Series(np.array([s for s, _ in found]), np.stack([v for _, v in found]))


def thin_out(series: Series, is_count: bool = False) -> Series:
    """Returns `series` with at most 400 points, as many as a plot can show.

    If the series has more points, several neighbours become one point. The new point has the mean
    of their values, or, with `is_count`, the last of their values.
    """
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
    """A plot: a title, an ``svg`` element that includes a description, and a caption.

    `wide` is an ``svg`` element of the same plot, as wide as two columns of the page; "" if the
    page needs no wide plot.
    """

    title: str
    svg: str
    caption: str
    wide: str = ""


class _PlotSettings(NamedTuple):
    """The settings of a plot whose horizontal axis is the step.

    `lines` is a dictionary from the label of a line in the legend to the name of its measurement in
    the metrics file. With `by_shard`, there is one measurement, which has a number for each shard.
    With `is_count` the vertical axis has whole numbers, and with `from_zero` it begins at 0.
    """

    title: str
    unit: str
    caption: str
    lines: Mapping[str, str]
    from_zero: bool = False
    is_count: bool = False
    by_shard: bool = False


_PLOTS = (
    _PlotSettings(
        "Speed",
        "tokens per second",
        "A mean over the steps since the last point, without the time of checkpoints and "
        "evaluations.",
        {"training": "tokens_per_second"},
        from_zero=True,
    ),
    _PlotSettings(
        "Learning rate",
        "learning rate",
        "The learning rate that the optimizer was given.",
        {"learning rate": "learning_rate"},
        from_zero=True,
    ),
    _PlotSettings(
        "Norm of the gradient",
        "norm",
        "The norm of all gradients together, summed over the mesh. If several microbatch steps "
        "make an update, it is the norm of the newest update's gradients.",
        {"before clipping": "gradient_norm/before_clipping", "applied": "gradient_norm/applied"},
    ),
    _PlotSettings(
        "Norms of the shards' gradients",
        "norm",
        "The norm of what each shard adds to the sum of gradients, before anything is clipped. If "
        "the loss is a mean over the batch, a shard adds its own gradient divided by the number of "
        "shards.",
        {"": "gradient_norm/of_shards"},
        by_shard=True,
    ),
    _PlotSettings(
        "Norms of the shards' gradients, clipped",
        "norm",
        "The norm of what each shard adds to the sum of gradients, after the shard was clipped by "
        "its own norm.",
        {"": "gradient_norm/of_shards_clipped"},
        by_shard=True,
    ),
    _PlotSettings(
        "Gradient noise scale",
        "sequences",
        "The noise scale is about the batch size from which on a larger batch saves few steps. The "
        "values are smoothed.",
        {"noise scale": "gradient_noise_scale"},
    ),
    _PlotSettings(
        "Loss scale",
        "factor",
        "The loss is multiplied by this factor before gradients are computed.",
        {"loss scale": "loss_scale/scale"},
    ),
    _PlotSettings(
        "Microbatch steps skipped",
        "microbatch steps so far",
        "Microbatch steps that should_skip_update_fn of GradientAccumulationOptimizer has skipped.",
        {"skipped": "accumulation/skipped"},
        is_count=True,
    ),
    _PlotSettings(
        "Steps skipped",
        "steps so far",
        "Steps that LossScaleOptimizer has skipped because a gradient was not finite.",
        {"skipped": "loss_scale/skipped"},
        is_count=True,
    ),
    _PlotSettings(
        "Steps without a contribution",
        "steps so far",
        "For each replica, the steps in which its gradient was stale, not finite or masked.",
        {"": "sync_replicas/dropped"},
        is_count=True,
        by_shard=True,
    ),
)
_HELD_OUT = "held out"
_LOSS = _PlotSettings(
    "Loss",
    "nats per token",
    "Cross entropy of the training batches, a mean over the steps since the last point, and of "
    "held-out text.",
    {},
)


def draw_plots(rows: Rows, unigram_nats: float | None) -> list[Plot]:
    """Draws and returns each plot for which the lines `rows` of a metrics file have data.

    `unigram_nats` is the loss of the unigram baseline, a model that knows only how often each token
    occurs. It is drawn as a horizontal line in the plot of the losses. If `unigram_nats` is None,
    the plot has no such line.
    """
    found = [
        _draw(plot, {label: series_of(rows, name) for label, name in plot.lines.items()})
        for plot in _PLOTS
    ]
    present = [plot for plot in found if plot]
    losses = {"training": training_losses(rows), _HELD_OUT: series_of(rows, "held_out_nats")}
    # With the losses in a wide plot, both columns end together.
    loss = _draw(_LOSS, losses, unigram_nats, is_wide=len(present) % 2 == 0)
    return [loss, *present] if loss else present


def training_losses(rows: Rows) -> Series | None:
    """Returns the training losses of a metrics file in nats per token, the unit of held-out losses.

    A metrics file of an older version of this package has no losses in nats per token. For such a
    file the result is the model's own losses, which are means over positions. The result is None if
    the file has no losses.
    """
    return series_of(rows, "nats_per_token") or series_of(rows, "loss")


def kilobytes(size: int) -> str:
    """Returns a number of bytes as text in kB of 1,000 bytes, without rounding."""
    return f"{size / 1e3:,.3f}"


def draw_islands(status: Status) -> Plot | None:
    """Draws the history of islands over time, a row for each; None if no island has joined."""
    if not status.rows:
        return None
    with figures.page_style():
        figure = figures.new_figure(height=1.3 + 0.3 * len(status.rows))
        plot_status(status, figure.add_subplot(), _SERIES)
        words = "; ".join(
            f"{row.island}: {row.contributed} contributions, {row.merged} merged, {row.late} late"
            for row in status.rows
        )
        drawn = figures.as_svg(figure, "islands", f"A row for each island over time. {words}.")
    caption = (
        "When each island was there, and what became of its contributions, until version "
        f"{status.version}."
    )
    return Plot("Islands", drawn, caption)


def draw_traffic(traffic: Traffic) -> Plot | None:
    """Draws the mesh traffic of an update step as bars; None if the step sends nothing."""
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
    with figures.page_style():
        figure = figures.new_figure(height=1.1 + 0.32 * len(rows))
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


def _draw(
    plot: _PlotSettings,
    found: Mapping[str, Series | None],
    level: float | None = None,
    is_wide: bool = False,
) -> Plot | None:
    """Draws a plot of series over steps; returns None if there is no series.

    `plot` has the plot's title and axes, and `found` has the series by label. A series of a plot by
    shard counts only if it has a value for each shard. `level` is the height of a horizontal line
    for the baseline; None draws no such line. `is_wide` is whether the plot is also drawn as wide
    as two columns of the page.
    """
    present = {
        label: series
        for label, series in found.items()
        if series is not None and (series.values.ndim == 2 or not plot.by_shard)
    }
    if not present:
        return None
    points = {
        label: series if label == _HELD_OUT else thin_out(series, plot.is_count)
        for label, series in present.items()
    }
    if plot.by_shard:
        words = _shards_in_words(*present.values())
    else:
        words = "; ".join(f"{label}: {_in_words(series)}" for label, series in present.items())
    if level is not None:
        words += f"; unigram baseline: {_short(level)}"

    def as_svg(width: float, suffix: str = "") -> str:
        with figures.page_style():
            figure = figures.new_figure(width)
            axes = figure.add_subplot()
            if plot.by_shard:
                _draw_shards(axes, *points.values())
            else:
                _draw_lines(axes, points, dict(zip(found, _SERIES)), level)
            axes.grid()
            axes.set_axisbelow(True)
            axes.set_xlabel("step")
            axes.set_ylabel(plot.unit)
            axes.xaxis.get_major_locator().set_params(integer=True)
            lowest = min(s.values.min() for s in present.values())
            highest = max(s.values.max() for s in present.values())
            if plot.is_count:
                axes.set_ylim(0, max(1.0, 1.05 * highest))
                axes.yaxis.get_major_locator().set_params(integer=True)
            elif plot.from_zero:
                axes.set_ylim(bottom=0)
            elif lowest > 0 and highest > _LOG_RATIO * lowest:
                from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
                axes.yaxis.set_minor_formatter(NullFormatter())
            prefix = "".join(c if c.isalnum() else "-" for c in plot.title.lower())
            return figures.as_svg(figure, prefix + suffix, f"{plot.title} over steps. {words}.")

    wide = as_svg(2 * figures.WIDTH + 0.3, "-wide") if is_wide else ""
    most = max(s.steps_per_point for s in points.values())
    of_means = f" Each point is the mean of {most} that were logged." if most > 1 else ""
    return Plot(plot.title, as_svg(figures.WIDTH), plot.caption + of_means, wide)


def _draw_lines(
    axes: Any, points: Mapping[str, Series], colors: Mapping[str, str], level: float | None
) -> None:
    for label, (steps, values, _) in points.items():
        form: dict[str, Any] = {"linewidth": 1.3}
        if len(steps) == 1:
            form = {"marker": "o"}
        elif label == _HELD_OUT:
            form = {"marker": "o", "linestyle": "none"}
        axes.plot(steps, values, color=colors[label], label=label, **form)
    if level is not None:
        form = {"color": figures.INK, "linestyle": "--", "linewidth": 1}
        axes.axhline(level, label="unigram baseline", **form)
    if len(axes.get_lines()) > 1:
        axes.legend(fontsize=8)


def _draw_shards(axes: Any, points: Series) -> None:
    """Draws a line for each shard, or the range and the median of many shards."""
    shards = points.values.shape[1]
    form: dict[str, Any] = {"marker": "o"} if len(points.steps) == 1 else {"linewidth": 1.2}
    if shards <= _MOST_LINES:
        for shard, color in zip(range(shards), _SERIES):
            values = points.values[:, shard]
            axes.plot(points.steps, values, color=color, label=f"shard {shard}", **form)
    else:
        low, high = points.values.min(axis=1), points.values.max(axis=1)
        fill = {"color": _SERIES[0], "alpha": 0.3, "linewidth": 0}
        axes.fill_between(points.steps, low, high, label=f"range of {shards} shards", **fill)
        middle = np.median(points.values, axis=1)
        axes.plot(points.steps, middle, color=_SERIES[0], label="median", **form)
    axes.legend(fontsize=8, ncols=2)


def _shards_in_words(series: Series) -> str:
    shards = series.values.shape[1]
    words = f"{shards} shards from step {series.steps[0]} to {series.steps[-1]}; at the end "
    if shards <= _MOST_LINES:
        return words + ", ".join(f"shard {n} {_short(x)}" for n, x in enumerate(series.last))
    low, high = int(np.argmin(series.last)), int(np.argmax(series.last))
    words += f"from {_short(series.last[low])} (shard {low}) to "
    return f"{words}{_short(series.last[high])} (shard {high})"


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
