import io

import numpy as np

from mtf_gradsync.train.metrics.file import MetricsFile, read_metrics
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


def test_metrics_of_steps_that_are_made_again_go(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    for step in (1, 2, 3):
        metrics.write(step, loss=float(step))
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    MetricsFile(path, 2).write(3, loss=7.0)
    assert [row["loss"] for row in read_metrics(path)] == [1.0, 2.0, 7.0]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
