import io

import numpy as np

from mtf_gradsync.train.progress import Progress


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
    assert lines[0] == "step 1/4  loss 2.000  tokens/s -  dropped 1"
    assert lines[1].startswith("step 4/4  loss 0.500  tokens/s ")
    assert lines[2:] == ["hello"]


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
