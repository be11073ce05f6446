"""What waits for the first step, and what it does not wait for."""

import json
import types
from concurrent.futures import Future

import gin
import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes._common import ConfigError, TrainingError
from mtf_gradsync.tools.train import held_out, loop, run_files
from mtf_gradsync.tools.train.data.batches import TrainingBatches
from mtf_gradsync.tools.train.data.vocabulary import ByteVocabulary
from mtf_gradsync.tools.train.figures import check_library
from mtf_gradsync.tools.train.metrics import MetricsRecorder, read_metrics
from mtf_gradsync.tools.train.run_files import REPORT_FILE


class Ahead:
    """A runner that notes what is asked of it; two steps may be ahead."""

    first_step, steps_ahead, peak_flops = 0, 2, 100.0

    def __init__(self, notes):
        self.notes, self.made = notes, 0

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        pass

    def dispatch(self):
        self.made += 1
        step = self.made
        self.notes.append(f"begin {step}")

        def result():
            self.notes.append(f"end {step}")
            return {"step": step, "loss": 1.0, "fields": {}, "reported": {}, "tokens": 1}

        return result

    def begin_save(self, step):
        saved = Future()
        saved.set_result(f"checkpoint-{step}")
        return saved

    def agreed_stop(self, received):
        return received

    def should_stop(self):
        return False

    def exchange(self, step, last):
        return step

    def no_update_error(self):
        return None


def test_the_first_step_is_shown_before_another_begins(tmp_path):
    notes = []
    result = loop.TrainingLoop(
        Ahead(notes),
        types.SimpleNamespace(optimizers=(), loss_denominator=1.0, num_parameters=5),
        types.SimpleNamespace(
            train_steps=4,
            save_checkpoints_steps=100,
            log_steps=100,
            timeline_steps=0,
            watch_copies_steps=None,
            eval_dataset_fn=None,
        ),
        1,
        MetricsRecorder(tmp_path, "metrics.jsonl", 0),
        lambda *args: bool(notes.append("checkpoint")),
        lambda: notes.append("first step"),
        lambda *args: None,
    ).run()
    assert notes[:3] == ["begin 1", "end 1", "first step"]
    # From then on steps run ahead.
    assert notes[3:6] == ["begin 2", "begin 3", "begin 4"]
    assert notes[-1] == "checkpoint"
    assert result.seconds >= 0
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["mfu"] == pytest.approx(6 * 5 * row["tokens_per_second"] / 100.0, rel=1e-3)


@pytest.mark.slow
def test_held_out_data_that_the_model_cannot_read_are_named_after_the_first_step(
    train, capsys, monkeypatch
):
    def refuse(*unused):
        raise ValueError("no such feature")

    monkeypatch.setattr(held_out, "Evaluator", refuse)
    with pytest.raises(
        ConfigError, match=r"train.run.eval_dataset_fn: ValueError: no such feature"
    ):
        train("train.run.train_steps = 2", "train.run.perplexity_eval_steps = 1")
    assert "step 1/2  loss " in capsys.readouterr().err


def test_a_missing_library_is_reported_before_the_run():
    check_library("json", "reading")
    with pytest.raises(ConfigError, match=r"drawing needs no_such_library: pip install"):
        check_library("no_such_library", "drawing")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("prompt_tokens = 16", "prompt_tokens must leave room in a sequence of 16 tokens; got 16"),
        ("prompt_tokens = 0", "prompt_tokens must be a whole number of 1 or more; got 0"),
        ("temperature = -1", "temperature must be a number of 0 or more; got -1"),
        ("temperature = 1e999", "temperature must be a number of 0 or more; got inf"),
        ("temperature = 'hot'", "temperature must be a number of 0 or more; got 'hot'"),
        ("keep_top_k = '5'", "keep_top_k must be a whole number of 0 or more; got '5'"),
        ("num_samples = 1.5", "num_samples must be a whole number of 0 or more; got 1.5"),
        ("max_tokens = None", "max_tokens must be a whole number of 1 or more; got None"),
        ("seed = -1", "seed must be a whole number of 0 or more; got -1"),
        ("seed = 4294967296", r"seed must be less than 2\*\*32; got 4294967296"),
    ],
)
def test_sampling_is_checked_before_anything_is_built(train, monkeypatch, setting, said):
    monkeypatch.setattr(held_out.data, "read_batches", lambda *unused: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=f"^train.sample.{said}$"):
        train(f"train.sample.{setting}")


@gin.configurable(module="tests.train")
def one_example(sequence_length, vocabulary, dataset_split, features):
    """A data set that has a single example."""
    return tf.data.Dataset.from_tensors(features)


@pytest.mark.parametrize(
    ("example", "said"),
    [
        ({"targets": [3] * 9}, r"'targets' the shape \[9\]; .*sequence_length wants \[16\]"),
        ({"targets": [3] * 15 + [259]}, "in batch 1, example 0 has the id 259 in 'targets', at 15"),
        ({"inputs": [3] * 16}, r"has the features \['inputs'\]; .* also needs \['targets'\]"),
    ],
)
def test_held_out_data_are_checked_before_the_first_step(train, monkeypatch, example, said):
    monkeypatch.setattr(TrainingBatches, "next", lambda self: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=f"^train.run.eval_dataset_fn.*{said}"):
        train("train.run.eval_dataset_fn = @one_example", f"one_example.features = {example}")


@gin.configurable(module="tests.train")
class BadAtWords(ByteVocabulary):
    """Has the bytes of a text, and fails to tell what it is."""

    def decode(self, ids):
        raise KeyError("no such word")


@pytest.mark.slow
def test_what_fails_after_the_last_step_loses_nothing(train, tmp_path):
    bindings = ["train.run.vocabulary = @BadAtWords()", "train.run.train_steps = 2"]
    message = r"All 2 steps were made and saved, .* KeyError: .*no such word.*evaluates again"
    with pytest.raises(TrainingError, match=message):
        train(*bindings)
    result = json.loads((tmp_path / "run" / run_files.RESULT_FILE).read_text())
    assert result["step"] == 2
    assert result["held_out"]["tokens"] == 3 * 8 * 16
    page = (tmp_path / "run" / REPORT_FILE).read_text()
    assert "2 of 2 steps: finished, but not evaluated to the end: KeyError" in page
    # Evaluated again, it keeps the speed that it had.
    again, directory, _ = train("train.run.train_steps = 2")
    whole = json.loads((directory / run_files.RESULT_FILE).read_text())
    assert whole == result
    assert again.held_out.tokens == 3 * 8 * 16


@pytest.mark.slow
def test_what_fails_before_it_scores_leaves_the_speed(train, tmp_path, monkeypatch):
    def fail(*unused):
        raise MemoryError

    monkeypatch.setattr(held_out.HeldOut, "score_checkpoint", lambda *unused: None)
    monkeypatch.setattr(held_out.Evaluator, "score", fail)
    with pytest.raises(TrainingError, match=r"All 2 steps were made .* failed: MemoryError"):
        train("train.run.train_steps = 2")
    result = json.loads((tmp_path / "run" / run_files.RESULT_FILE).read_text())
    assert sorted(result) == ["seconds", "step", "tokens_per_second"]
