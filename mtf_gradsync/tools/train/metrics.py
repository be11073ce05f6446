"""Progress of a run on the screen, and its measurements in the metrics and event files."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, ContextManager, Iterator, Mapping, TextIO

import numpy as np
from tqdm import tqdm

from mtf_gradsync.extension import split_by_shard, tf
from mtf_gradsync.runtimes._common import first_line, unused_path, write_text
from mtf_gradsync.runtimes.step_means import StepMeans

# For example of a field with one number for each replica.
_MOST_NUMBERS = 16


class Progress:
    """A progress bar on a terminal; without a terminal a line now and then."""

    def __init__(
        self,
        first_step: int,
        train_steps: int,
        tokens_per_step: int,
        stream: TextIO | None = None,
        seconds_between_lines: float = 10.0,
    ):
        """Begins to show a run from first_step to train_steps, on `stream` or standard error.

        The run has made `first_step` steps, and makes `train_steps` in all. Each step has
        `tokens_per_step` tokens, from which the tokens per second are computed. If the stream is no
        terminal, at least `seconds_between_lines` pass between two printed lines.
        """
        self._stream = stream or sys.stderr
        self._total = train_steps
        self._tokens_per_step = tokens_per_step
        self._between = seconds_between_lines
        self._rate = _Rate(first_step, tokens_per_step)
        self._last_line: float | None = None
        self._bar: Any = None
        if self._stream.isatty():
            self._bar = tqdm(
                initial=first_step,
                total=train_steps,
                unit="step",
                file=self._stream,
                **_bar_width(self._stream),
                # tqdm counts steps; the rate that matters is tokens, in the postfix.
                bar_format="{percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt} "
                "[{elapsed}<{remaining}{postfix}]",
            )

    def update(self, step: int, loss: float, fields: dict[str, Any]) -> None:
        """Shows the loss of a step; `fields` are more values to show, by name."""
        self._rate.update(step)
        rate = self._rate.tokens_per_second()
        shown = {"loss": f"{loss:.3f}", "tokens/s": f"{rate:,.0f}" if rate else "-"}
        if self._bar is None:  # a bar says it by itself
            shown["left"] = self._rate.time_left(self._total - step)
        shown.update({name: _short(value) for name, value in fields.items()})
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if self._last_line is None or step >= self._total or now - self._last_line >= self._between:
            self._last_line = now
            text = "  ".join(f"{name} {value}" for name, value in shown.items())
            print(f"step {step}/{self._total}  {text}", file=self._stream, flush=True)

    def tokens_per_second(self) -> float:
        """Returns the tokens per second since the last call of this method, without pauses.

        The result is 0 if no steps were timed since the last call.
        """
        return self._rate.since_last_asked()

    def message(self, text: str) -> None:
        """Writes `text` as a line of its own without disturbing the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def pause(self) -> None:
        """Excludes the time until the next step from the rate of tokens.

        The training loop calls `pause` when an evaluation or the writing of a checkpoint begins.
        """
        self._rate.pause()

    def close(self) -> None:
        """Ends the bar; calling it twice does no harm."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _Rate:
    """The tokens per second in the last seconds, without pauses, and the time left in the run.

    The time left in the run is computed from all steps and pauses except the first step, because
    the first step may have included compilation.
    """

    _SECONDS = 5.0

    def __init__(self, step: int, tokens_per_step: int):
        self._tokens_per_step = tokens_per_step
        self._step = step
        self._last: float | None = None
        # Seconds and steps that were timed: in the last seconds, and since the last line.
        self._recent, self._since_line = np.zeros(2), np.zeros(2)
        self._began: tuple[float, int] | None = None

    def update(self, step: int) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = now, step
        if self._last is not None:
            timed = now - self._last, step - self._step
            self._since_line += timed
            self._recent += timed
            if self._recent[0] > self._SECONDS:
                self._recent *= self._SECONDS / self._recent[0]
        self._step = step
        self._last = now

    def pause(self) -> None:
        self._last = None

    def tokens_per_second(self) -> float:
        return self._of(self._recent)

    def since_last_asked(self) -> float:
        timed, self._since_line = self._since_line, np.zeros(2)
        return self._of(timed)

    def _of(self, timed: np.ndarray) -> float:
        seconds, steps = timed.tolist()
        return steps * self._tokens_per_step / seconds if seconds else 0.0

    def time_left(self, steps: int) -> str:
        """Returns how long `steps` steps will take, as "02:05"; "-" if that is not known yet."""
        if self._began is None or self._step == self._began[1] or self._last is None:
            return "-"
        began, first = self._began
        return tqdm.format_interval((self._last - began) / (self._step - first) * steps)


def _bar_width(stream: TextIO) -> dict[str, Any]:
    """Returns arguments of tqdm that make its bar as wide as the terminal of `stream`.

    If the width of the terminal is not known, the bar is 80 columns wide.
    """
    try:
        known = os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):
        known = False
    return {"dynamic_ncols": True} if known else {"ncols": 80}


def _short(value: Any) -> str:
    """Returns a short text for a number, or an array of numbers.

    The result for an array of many numbers is a range, such as "1 to 5".
    """
    shape = getattr(value, "shape", ())
    if shape:
        if value.size > _MOST_NUMBERS and value.dtype.kind in "iuf":
            return f"{_short(value.min())} to {_short(value.max())}"
        return str(value.reshape(-1))
    number = value.item() if hasattr(value, "item") else value
    return f"{number:.4g}" if isinstance(number, float) else str(number)


# A line with what a session left for the means of the next line; only the next session reads it.
_MEANS = "means_so_far"


class MetricsFile:
    """A file with a JSON object per line: ``step``, and measurements at that step."""

    def __init__(self, path: Path, first_step: int):
        """Opens the file for a session that begins after `first_step` steps of the run.

        Lines of the first `first_step` steps stay in the file. Lines of later steps are deleted:
        the run goes on from a checkpoint and makes the later steps again.
        """
        self._path = path
        kept = [row for row in read_metrics(path) if row["step"] <= first_step]
        #: What an earlier session left at this very step for the means of the next line.
        self.saved_means = next(
            (row[_MEANS] for row in reversed(kept) if _MEANS in row and row["step"] == first_step),
            None,
        )
        kept = [row for row in kept if _MEANS not in row]
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, step: int, **values: Any) -> None:
        """Appends a line with the measurements `values` of a step, which JSON can hold."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics file: for each the step and its measurements, by name.

    Incomplete lines of the file are skipped, because a process that was killed while it wrote may
    have left one. The result is empty if there is no metrics file.
    """
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


# Seconds of events that a killed run may lose, besides the steps that are made again.
_FLUSH_SECONDS = 30


class EventFile:
    """An event file for the scalar summaries of this session of a run.

    Every method raises OSError if the file cannot be written. A ``tf.summary.FileWriter`` would not
    raise it: errors in the writer's thread do not reach the caller.
    """

    def __init__(self, directory: Path, first_step: int):
        """Creates the file of a session that begins after first_step steps.

        The first event in the file makes TensorBoard ignore what earlier sessions of the run wrote
        for steps after `first_step`. TensorFlow's own training sessions begin their files with the
        same event.
        """
        now = time.time()
        # Files are named by the second; a session may begin within the same one.
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.from_step_{first_step:09d}"
        self._path = unused_path(directory / name)
        self._flushed_at = time.monotonic()
        with self._writing():
            self._writer = tf.io.TFRecordWriter(str(self._path))
        self._add(tf.Event(wall_time=now, file_version="brain.Event:2"))
        start = tf.SessionLog(status=tf.SessionLog.START)
        self._add(tf.Event(wall_time=now, step=first_step + 1, session_log=start))

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Adds scalar summaries of a step; numbers that are not finite are left out.

        `scalars` are the numbers, by the tag under which TensorBoard shows them.
        """
        values = [
            tf.Summary.Value(tag=tag, simple_value=float(value))
            for tag, value in scalars.items()
            if math.isfinite(value)
        ]
        if values:
            summary = tf.Summary(value=values)
            self._add(tf.Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Writes everything so far to disk."""
        with self._writing():
            self._writer.flush()
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Ends the file; calling it twice does no harm."""
        with self._writing():
            self._writer.close()

    def _add(self, event: Any) -> None:
        with self._writing():
            self._writer.write(event.SerializeToString())
        if time.monotonic() - self._flushed_at > _FLUSH_SECONDS:
            self.flush()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        # TensorFlow has errors of its own for some, and Python's for others.
        except (tf.errors.OpError, LookupError, RuntimeError, ValueError) as error:
            what = first_line(error).replace(f"{self._path}; ", "")
            raise OSError(errno.EIO, what, str(self._path)) from error


# Names in the metrics file that differ from their tags in the event file, for old files' sake.
_TAGS = {"held_out_nats": "held_out/nats_per_token"}


_IN_FULL = ("loss", "nats_per_token")


class MetricsRecorder(ContextManager["MetricsRecorder"]):
    """A context manager that writes measurements of steps to the metrics and event files."""

    def __init__(self, directory: Path, metrics_file: str, first_step: int):
        """Opens the metrics file and a new event file for one start of a run.

        The run has made `first_step` steps before. Both files are in `directory`, and
        `metrics_file` is the name of the metrics file.
        """
        self._metrics = MetricsFile(directory / metrics_file, first_step)
        self.saved_means = self._metrics.saved_means
        self._events = EventFile(directory, first_step)

    def __exit__(self, *unused_exception: Any) -> None:
        self._events.close()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the measurements `values` of a step, by name, to the metrics and event files.

        A measurement is a number, or an array with a number for each shard. A measurement that is
        not finite is written only if it is a loss.
        """
        scalars = split_by_shard(values)
        self._events.write(step, {_TAGS.get(name, name): x for name, x in scalars.items()})
        plain = {name: _as_json(value) for name, value in values.items()}
        line = {name: value for name, value in plain.items() if value is not None}
        # With all of their digits, because runs are compared by them.
        line.update({name: float(values[name]) for name in _IN_FULL if name in values})
        self._metrics.write(step, **line)

    def save_means(self, step: int, means: StepMeans) -> None:
        """Writes the sums from which the means in the next line of the metrics file are computed.

        The training loop calls `save_means` when it saves a checkpoint of `step`, which may be
        between two lines. A session that goes on from the checkpoint reads the sums and adds to
        them. So the first line of that session has the same means as it would have in a run without
        a stop. `means` has the sums.
        """
        state = means.state()
        if state is not None:
            self._metrics.write(step, **{_MEANS: state})

    def write_once(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes numbers that do not change during a run only to the event file.

        `scalars` are the numbers, by the tag under which TensorBoard shows them.
        """
        self._events.write(step, scalars)

    def flush(self) -> None:
        """Writes everything so far to disk, before a checkpoint is saved."""
        self._events.flush()


def _as_json(value: Any) -> Any:
    """Converts a number to one that JSON can hold, and an array to a list of such numbers.

    Floats are rounded to 6 significant digits. The result is None if any number is not finite.
    """
    array = np.asarray(value)
    if not np.all(np.isfinite(array)):
        return None
    if array.dtype.kind != "f":
        return array.ravel().tolist() if array.shape else array.item()
    rounded = [float(f"{x:.6g}") for x in array.ravel().tolist()]
    return rounded if array.shape else rounded[0]
