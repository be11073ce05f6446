"""Shows the progress of a run."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, TextIO

from tqdm import tqdm

# For example of a field with one number for each replica.
_MOST_NUMBERS = 16


class Progress:
    """A progress bar on a terminal; anywhere else a line now and then."""

    def __init__(
        self,
        first_step: int,
        train_steps: int,
        tokens_per_step: int,
        stream: TextIO | None = None,
        seconds_between_lines: float = 10.0,
    ):
        """Begins to show a run from first_step to train_steps, on `stream` or standard error."""
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
        """Shows the loss of a step, and more fields by name."""
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
        """Returns the rate over the last steps."""
        return self._rate.tokens_per_second()

    def message(self, text: str) -> None:
        """Writes a line without disturbing the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def pause(self) -> None:
        """Excludes the time until the next step (an evaluation, a checkpoint) from the rate."""
        self._rate.pause()

    def close(self) -> None:
        """Ends the bar; calling it twice does no harm."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _Rate:
    """Measures tokens per second in the last seconds, without pauses, and the time that is left.

    That time is computed from all steps, pauses included, without the first, which may have been
    compiled.
    """

    _SECONDS = 5.0

    def __init__(self, step: int, tokens_per_step: int):
        self._tokens_per_step = tokens_per_step
        self._step = step
        self._last: float | None = None
        self._seconds = 0.0
        self._steps = 0.0
        self._began: tuple[float, int] | None = None

    def update(self, step: int) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = now, step
        if self._last is not None:
            self._seconds += now - self._last
            self._steps += step - self._step
            if self._seconds > self._SECONDS:
                keep = self._SECONDS / self._seconds
                self._seconds *= keep
                self._steps *= keep
        self._step = step
        self._last = now

    def pause(self) -> None:
        self._last = None

    def tokens_per_second(self) -> float:
        return self._steps * self._tokens_per_step / self._seconds if self._seconds else 0.0

    def time_left(self, steps: int) -> str:
        """Returns how long more steps will take, such as "02:05"; "-" where it is not known yet."""
        if self._began is None or self._step == self._began[1] or self._last is None:
            return "-"
        began, first = self._began
        return tqdm.format_interval((self._last - began) / (self._step - first) * steps)


def _bar_width(stream: TextIO) -> dict[str, Any]:
    """Returns a bar as wide as the terminal, or 80 columns where the terminal says it has none."""
    try:
        known = os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):
        known = False
    return {"dynamic_ncols": True} if known else {"ncols": 80}


def _short(value: Any) -> str:
    """Returns a field as text: numbers short, a few numbers all, many as their range."""
    shape = getattr(value, "shape", ())
    if shape:
        if value.size > _MOST_NUMBERS and value.dtype.kind in "iuf":
            return f"{_short(value.min())} to {_short(value.max())}"
        return str(value.reshape(-1))
    number = value.item() if hasattr(value, "item") else value
    return f"{number:.4g}" if isinstance(number, float) else str(number)
