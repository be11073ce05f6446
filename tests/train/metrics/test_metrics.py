"""The metrics file and TensorBoard's event files."""

import json

import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.train.metrics import MetricsFile, MetricsRecorder, read_metrics

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


def events_shown(directory):
    """Steps and values by tag, of what a session made again the newest."""
    shown = {}
    for path in sorted(directory.glob("events.out.tfevents.*")):
        for event in tf.train.summary_iterator(str(path)):
            if event.session_log.status == tf.SessionLog.START:
                for tag, values in shown.items():
                    shown[tag] = [(step, x) for step, x in values if step < event.step]
            for value in event.summary.value:
                shown.setdefault(value.tag, []).append((event.step, value.simple_value))
    return shown


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
