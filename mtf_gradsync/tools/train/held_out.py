"""Evaluates a run on held-out data: while it trains, and at its end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Callable, ContextManager, Mapping, Sequence

from mtf_gradsync.extension import tf
from mtf_gradsync.runtimes._common import ConfigError, first_line, write_json, write_text
from mtf_gradsync.tools.train.config import RunConfig
from mtf_gradsync.tools.train.data import datasets as data
from mtf_gradsync.tools.train.data.batches import wrong_id_error
from mtf_gradsync.tools.train.evaluation import Batches, Evaluator, Score, unigram_score
from mtf_gradsync.tools.train.metrics import MetricsRecorder, Progress
from mtf_gradsync.tools.train.model import ModelSettings
from mtf_gradsync.tools.train.run_files import RESULT_FILE, SAMPLES_FILE
from mtf_gradsync.tools.train.sampling import Sampling, escape_controls, sample

# Fields of the result file of a run that has made steps.
SPEED = ("seconds", "tokens_per_second")

# Batches that the unigram baseline counts in; enough to see every byte or common subword.
_BASELINE_BATCHES = 100


class Improvement:
    """The lowest held-out loss of a run, and the rule that ends a run whose loss falls no more."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], most_steps: int | None):
        """Begins with the held-out losses in `rows`, the lines of a metrics file.

        `most_steps` is `RunConfig.max_steps_without_decrease`; if it is None, the run never ends
        because of its held-out losses.
        """
        self._most_steps = most_steps
        self.best: float | None = None
        self.best_step = self._newest = 0
        for row in rows:
            if "held_out_nats" in row:
                self.add(row["step"], row["held_out_nats"])

    def add(self, step: int, nats: float) -> bool:
        """Adds the held-out loss of a step, in nats; returns whether it is the lowest so far."""
        self._newest = max(step, self._newest)
        if not math.isfinite(nats) or (self.best is not None and nats >= self.best):
            return False
        self.best, self.best_step = nats, step
        return True

    @property
    def has_ended(self) -> bool:
        """Whether the loss has not fallen for so many steps that the run has to end."""
        if self._most_steps is None or self.best is None:
            return False
        return self._newest - self.best_step >= self._most_steps

    def __str__(self) -> str:
        return f"the held-out loss has not fallen since step {self.best_step} ({self.best:.3f})"


class HeldOut(ContextManager["HeldOut"]):
    """The evaluation of a run on held-out data, as a context manager.

    `unigram` is the score of the unigram baseline. Once the run is finished, `result` is the
    content of the run's result file, and `samples` are the texts that the model wrote.
    """

    def __init__(
        self,
        model: ModelSettings,
        config: RunConfig,
        directory: Path,
        session: tf.ConfigProto,
        say: Callable[[str], None],
    ):
        """Keeps the settings of the evaluation; held-out data are read by `prepare`.

        `model` and `config` are the settings of the run, and `directory` is the folder to which
        files are written. `session` has the settings of the session that evaluates the model. `say`
        is called with each line of text for the user.
        """
        self._model, self._config, self._directory = model, config, directory
        self._session, self._say = session, say
        self._sampling: Sampling | None = None
        self._held_out: Batches = []
        self._evaluator: Evaluator | None = None
        self._scored: tuple[str, Score] | None = None
        self.unigram: Score | None = None
        self.result: dict[str, Any] = {}
        self.samples = ""

    def prepare(self) -> None:
        """Reads the held-out batches, and scores the unigram baseline on them.

        Raises ConfigError if the held-out data are empty, or cannot be read or scored, or if the
        settings by which the model writes samples cannot work.
        """
        eval_dataset_fn, steps = self._config.eval_dataset_fn, self._config.perplexity_eval_steps
        assert eval_dataset_fn is not None  # the caller has asked
        if self._model.model_type == "lm":
            self._sampling = Sampling()
            self._sampling.check(self._model.sequence_length["targets"])
        arguments = {
            "sequence_length": self._model.sequence_length,
            "vocabulary": self._model.vocabulary,
        }

        def held_out_dataset() -> Any:
            dataset = eval_dataset_fn(dataset_split="validation", **arguments)
            return dataset[0].dataset_fn() if isinstance(dataset, (list, tuple)) else dataset

        # One more, to know whether there are more.
        held_out = data.read_batches(
            held_out_dataset, self._model.batch_size, steps + 1, "train.run.eval_dataset_fn"
        )
        if not held_out:
            raise ConfigError(
                f"train.run.eval_dataset_fn = {eval_dataset_fn!r} gives an empty data set"
            )
        if len(held_out) > steps:
            held_out.pop()
            self._say(
                f"held-out data are scored to the end of batch {steps} "
                "(train.run.perplexity_eval_steps); there are more"
            )
        self._check(held_out)
        train = data.read_batches(
            lambda: self._config.train_dataset_fn(dataset_split="train", **arguments),
            self._model.batch_size,
            _BASELINE_BATCHES,
            "train.run.train_dataset_fn",
        )
        self.unigram = unigram_score(train, held_out, self._model.vocabulary)
        self._held_out = held_out

    def _check(self, batches: Batches) -> None:
        """Raises ConfigError if the model cannot score `batches`, which are held-out data."""
        model, of = self._model, "train.run.eval_dataset_fn"
        model.check_features(batches[0], of)
        sizes = model.vocab_sizes
        for number, batch in enumerate(batches, 1):
            for name, ids in batch.items():
                if not model.reads(name):
                    continue
                if ids.shape[1:] != (model.feature_length(name),):
                    raise ConfigError(
                        f"{of} gives examples of {name!r} the shape {list(ids.shape[1:])}; "
                        f"train.run.sequence_length wants {[model.feature_length(name)]}"
                    )
                wrong = name in sizes and wrong_id_error(name, ids, sizes[name])
                if wrong:
                    raise ConfigError(f"{of}: in batch {number}, {wrong}")

    def build(self) -> None:
        """Builds the graph of the evaluation, unless it exists or there are no held-out data.

        Raises ConfigError if the model's graph cannot be built for the held-out batches.
        """
        if not self._held_out or self._evaluator is not None:
            return
        try:
            self._evaluator = Evaluator(
                self._model, self._held_out, self._session, self._config.evaluate_with_averages
            )
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                "The model cannot be built for the batches of train.run.eval_dataset_fn: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error

    def __exit__(self, *unused_exception: Any) -> None:
        if self._evaluator is not None:
            self._evaluator.close()

    def score_checkpoint(
        self, path: str, step: int, recorder: MetricsRecorder, progress: Progress
    ) -> Score | None:
        """Returns the score of the checkpoint `path` on held-out data; None if there are no data.

        `step` is the step of the checkpoint. The held-out loss is written by `recorder` as
        "held_out_nats", and `progress` shows a line with the loss and the perplexity. The training
        loop calls this method after each checkpoint.
        """
        if not self._held_out:
            return None
        score = self._score(path)
        recorder.write(step, {"held_out_nats": score.nats_per_token})
        progress.message(
            f"step {step}: held-out loss {score.nats_per_token:.3f}, "
            f"perplexity {score.perplexity:.3f}"
        )
        return score

    def finish(self, path: str | None, writes: bool = True, **result: Any) -> Score | None:
        """Evaluates the finished model; writes samples, and the result file with `result` in it.

        `path` is the run's last checkpoint, and the returned score is the score of this checkpoint.
        If there are no held-out data, `path` may be None, and the result is None. Unless `writes`
        is set, scores and samples are printed, but written to no file. `result` is the first part
        of the result file's content: it has "step", and the speed of training if steps were made.
        """
        self.result = dict(result)
        if len(result) > 1:
            # Steps were made: the result has their number and speed, whatever follows.
            write_json(self._directory / RESULT_FILE, self.result)
        else:
            before = self._read_result(result["step"])
            self.result = {**{name: before[name] for name in SPEED if name in before}, **result}
        score = None
        if self._held_out:
            # Held-out data come with a baseline and, since the run is evaluated, a checkpoint.
            assert path is not None
            assert self.unigram is not None
            score = self._score(path)
            self.result["held_out"] = _score_fields(score)
            self.result["unigram"] = _score_fields(self.unigram)
            self._say(f"held-out loss     {_score_text(score)}")
            self._say(f"unigram baseline  {_score_text(self.unigram)}")
            if score.perplexity >= self.unigram.perplexity:
                self._say("the model has not learned more than how frequent each token is")
        if writes:
            write_json(self._directory / RESULT_FILE, self.result)
        if score is not None and self._sampling is not None:
            self._write_samples(self._sampling, writes)
        return score

    def is_complete(self, step: int) -> bool:
        """Returns whether the result file has all that `finish` writes for the model of `step`."""
        before = self._read_result(step)
        return bool(before) and (not self._held_out or "held_out" in before)

    def _read_result(self, step: int) -> dict[str, Any]:
        """Returns the content of the result file if it was written for `step`; else {}."""
        try:
            before = json.loads((self._directory / RESULT_FILE).read_text(encoding="utf-8"))
            return before if before["step"] == step else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _score(self, path: str) -> Score:
        """Returns the score of the checkpoint `path` on all held-out batches.

        After the call the evaluator's variables have the checkpoint's values.
        """
        self.build()
        if self._scored is None or self._scored[0] != path:
            assert self._evaluator is not None  # the callers have asked
            self._evaluator.restore(path, str(self._directory))
            self._scored = (path, self._evaluator.score())
        return self._scored[1]

    def _write_samples(self, settings: Sampling, writes: bool) -> None:
        assert self._evaluator is not None  # it has scored
        texts = [
            f"--- sample {number}: prompt\n{escape_controls(one.prompt)}\n"
            f"--- continuation\n{escape_controls(one.continuation)}\n"
            for number, one in enumerate(sample(self._evaluator, settings), 1)
        ]
        if texts:
            self.samples = "\n".join(texts)
            self._say(self.samples)
            if writes:
                write_text(self._directory / SAMPLES_FILE, self.samples)


def _score_text(score: Score) -> str:
    return (
        f"{score.nats_per_token:.3f} nats per token: perplexity {score.perplexity:.3f}, "
        f"{score.bits_per_byte:.3f} bits per byte"
    )


def _score_fields(score: Score) -> dict[str, float]:
    return {
        "perplexity": score.perplexity,
        "nats_per_token": score.nats_per_token,
        "bits_per_byte": score.bits_per_byte,
        "tokens": score.tokens,
    }
