"""What waits for the first step, and what it does not wait for."""

import pytest

from mtf_gradsync.runtimes.errors import ConfigError
from mtf_gradsync.train import held_out, loop
from mtf_gradsync.train.figures import check_installed
from mtf_gradsync.train.runner import Runner


class Ahead(Runner):
    """Notes what is asked of it; two steps may be ahead."""

    steps_ahead = 2

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
            return {"step": step, "loss": 1.0, "fields": {}, "reported": {}}

        return result

    def save(self, step):
        return f"checkpoint-{step}"

    def timeline(self):
        raise NotImplementedError

    def waits_too_long(self):
        return None


def test_the_first_step_is_shown_before_another_begins():
    notes = []
    result = loop.train_loop(
        Ahead(notes),
        [],
        loop.LoopSettings(4, 100, 100, 1),
        type("Recorder", (), {"write": lambda *args: None})(),
        lambda *args: notes.append("checkpoint"),
        lambda: notes.append("first step"),
    )
    assert notes[:3] == ["begin 1", "end 1", "first step"]
    # From then on steps run ahead.
    assert notes[3:6] == ["begin 2", "begin 3", "begin 4"]
    assert notes[-1] == "checkpoint"
    assert result.seconds >= 0


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
    check_installed("json", "reading")
    with pytest.raises(ConfigError, match=r"drawing needs no_such_library: pip install"):
        check_installed("no_such_library", "drawing")
