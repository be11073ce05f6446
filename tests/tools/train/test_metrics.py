"""The metrics file and TensorBoard's event files."""

import json

import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.step_means import Measured, StepMeans
from mtf_gradsync.tools.train.metrics import MetricsFile, MetricsRecorder, read_metrics
from tests.tools.train.events import events_shown

FILE = "metrics.jsonl"


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


def tensorboard_shows(directory):
    """The same as TensorBoard itself has it."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = accumulator.EventAccumulator(str(directory), purge_orphaned_data=True)
    shown.Reload()
    return {tag: [(e.step, e.value) for e in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def record(directory, first_step, last_step, scale=1.0):
    with MetricsRecorder(directory, FILE, first_step) as recorder:
        for step in range(first_step + 1, last_step + 1):
            recorder.write(step, {"loss": scale * step})


def test_steps_that_are_made_again_are_there_once(tmp_path):
    """A run that was killed after step 5 goes on from its checkpoint of step 3."""
    record(tmp_path, 0, 5)
    record(tmp_path, 3, 6, scale=10.0)
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0)]
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path / FILE)] == expected
    assert events_shown(tmp_path) == {"loss": expected}
    assert tensorboard_shows(tmp_path) == {"loss": expected}


def test_shards_have_tags_of_their_own_and_values_that_are_not_finite_are_skipped(tmp_path):
    values = {
        "loss": np.float32(0.1),
        "norm": np.float32(np.nan),
        "gradient_norm/of_shards": np.array([[1.0, 2.0]], np.float32),
        "sync_replicas/dropped": np.array([3, 4], np.int32),
        "held_out_nats": 1.5,
    }
    with MetricsRecorder(tmp_path, FILE, 0) as recorder:
        recorder.write(1, values)
        recorder.write_once(1, {"traffic/bytes_of_update_step": 100})
    (line,) = (tmp_path / FILE).read_text().splitlines()
    assert json.loads(line) == {
        "step": 1,
        "loss": float(np.float32(0.1)),
        "gradient_norm/of_shards": [1.0, 2.0],
        "sync_replicas/dropped": [3, 4],
        "held_out_nats": 1.5,
    }
    assert {tag: value for tag, ((_, value),) in events_shown(tmp_path).items()} == {
        "loss": np.float32(0.1),
        "gradient_norm/of_shards/shard_0": 1.0,
        "gradient_norm/of_shards/shard_1": 2.0,
        "sync_replicas/dropped/shard_0": 3.0,
        "sync_replicas/dropped/shard_1": 4.0,
        "held_out/nats_per_token": 1.5,
        "traffic/bytes_of_update_step": 100.0,
    }


def test_an_interrupt_leaves_whole_files(tmp_path):
    def interrupted():
        with MetricsRecorder(tmp_path, FILE, 0) as recorder:
            recorder.write(1, {"loss": 2.0})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    assert [e.step for e in tf.train.summary_iterator(str(path))] == [0, 1, 1]


LOSSES = [6.0, 2.0, 4.0, 8.0, 1.0, 3.0, 5.0, 7.0]


def lines(every, in_sums=None, breaks=(), tmp_path=None):
    """The mean losses of lines after every so many steps; sessions end after steps in `breaks`."""
    means, found = StepMeans(1.0), {}
    for step, loss in enumerate(LOSSES, 1):
        means.add(Measured(loss, 1), in_sums and in_sums[step - 1])
        if step % every == 0:
            found[step] = means.values()["loss"]
            means.end_line()
        if step in breaks:
            with MetricsRecorder(tmp_path, FILE, step) as recorder:
                recorder.save_means(step, means)
            means = StepMeans(1.0)
            with MetricsRecorder(tmp_path, FILE, step) as recorder:
                if recorder.saved_means is not None:
                    means.restore(recorder.saved_means)
            assert not read_metrics(tmp_path / FILE)
    return found


@pytest.mark.parametrize("breaks", [(), (1, 2), (3, 5), (4,), (6, 7)])
def test_a_line_is_the_mean_over_the_steps_since_the_last_and_over_an_updates(tmp_path, breaks):
    def mean(first, last):
        return np.mean(LOSSES[first - 1 : last])

    assert lines(1, None, breaks, tmp_path) == dict(enumerate(LOSSES, 1))
    assert lines(3, None, breaks, tmp_path) == {3: mean(1, 3), 6: mean(4, 6)}
    # An update of four microbatch steps: a line is never of a part of those that were made.
    waiting = [1, 2, 3, 0, 1, 2, 3, 0]
    assert lines(1, waiting, breaks, tmp_path) == {
        step: mean(1 if step <= 4 else 5, step) for step in range(1, 9)
    }
    assert lines(3, waiting, breaks, tmp_path) == {3: mean(1, 3), 6: mean(4, 6)}
    assert lines(2, waiting, breaks, tmp_path) == {
        2: mean(1, 2), 4: mean(1, 4), 6: mean(5, 6), 8: mean(5, 8)
    }  # fmt: skip
    # Every step is an update, or skipped with nothing in the sums.
    assert lines(1, [0] * 8, breaks, tmp_path) == dict(enumerate(LOSSES, 1))


def test_steps_that_are_skipped_are_in_no_update():
    """Microbatch steps 2 and 5 add nothing to the sums of three; step 7 begins others."""
    means, found, left = StepMeans(), [], []
    for loss, in_sums in zip(LOSSES, [1, 1, 2, 0, 0, 1, 2, 2]):
        means.add(Measured(loss), in_sums)
        found.append(means.values()["loss"])
        left.append(means.steps_in_no_update)
        means.end_line()
    assert found == [6, 2, 5, 6, 1, 3, 4, 4]
    assert left == [1, 1, 2, 0, 0, 1, 2, 2]


def test_losses_have_their_weights():
    means = StepMeans()
    means.add(Measured(2.0, weight=30.0))
    means.add(Measured(4.0, weight=10.0))
    means.add(Measured(float("nan"), weight=0.0))  # a mean of nothing
    assert means.values()["loss"] == 2.5


def test_means_are_of_tokens_where_losses_are_of_positions():
    """Two batches of 256 positions: 137 and 60 tokens of 4.5 and 2 nats."""
    means = StepMeans(256.0)
    means.add(Measured(137 * 4.5 / 256, 137, 0.5), None)
    means.add(Measured(60 * 2 / 256, 60, 0.25), None)
    values = means.values()
    assert values["nats_per_token"] == pytest.approx((137 * 4.5 + 60 * 2) / 197)
    assert values["loss"] == pytest.approx((137 * 4.5 + 60 * 2) / 512)
    assert values["learning_rate"] == 0.375
    # A step that was skipped, and one that has nothing but padding.
    means.end_line()
    means.add(Measured(float("nan"), 9, 0.5), None)
    assert np.isnan(means.values()["loss"])
    means.add(Measured(0.0, 0, 0.5), None)
    assert means.values() == {"loss": 0.0, "learning_rate": 0.5}
