import io
import time

import numpy as np

from mtf_gradsync.tools.train.metrics import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_without_a_terminal():
    stream = io.StringIO()
    progress = Progress(0, 4, tokens_per_step=10, stream=stream, seconds_between_lines=3600)
    for step in range(1, 5):
        progress.update(step, 2.0 / step, {"dropped": np.int64(step)})
    progress.message("hello")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 1/4  loss 2.000  tokens/s -  left -  dropped 1"
    assert lines[1].startswith("step 4/4  loss 0.500  tokens/s ")
    assert lines[2:] == ["hello"]


def test_plain_lines_show_the_time_that_is_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = Progress(10, 1000, tokens_per_step=1, stream=stream, seconds_between_lines=0)
    for step in (11, 12, 13):
        progress.update(step, 1.0, {})
        now[0] += 2.0
        if step == 12:
            now[0] += 10.0  # an evaluation
            progress.pause()
    left = [line.split("  left ")[1] for line in stream.getvalue().splitlines()]
    # Two seconds for each of 988 steps; then 14 for two steps, with the pause.
    assert left == ["-", "32:56", "1:55:09"]


def test_bar_on_a_terminal_shows_step_loss_and_rate():
    stream = Terminal()
    progress = Progress(2, 4, tokens_per_step=10, stream=stream)
    progress.update(3, 1.5, {"norm": np.float32(0.25)})
    progress.update(4, 1.25, {"norm": np.float32(0.5)})
    progress.close()
    progress.close()
    last = stream.getvalue().split("\r")[-1]
    for part in ("100%", "step 4/4", "loss=1.250", "tokens/s=", "norm=0.5"):
        assert part in last
