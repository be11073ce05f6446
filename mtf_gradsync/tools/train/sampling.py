"""Continues texts by a language model, at the end of a run and in ``mtf-gradsync sample``."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import NamedTuple

import gin
import numpy as np

from mtf_gradsync.extension import is_number, is_whole_number
from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.runtimes.settings import session_config
from mtf_gradsync.tools.train.config import transformer_utils
from mtf_gradsync.tools.train.data.vocabulary import PAD_ID
from mtf_gradsync.tools.train.evaluation import Evaluator
from mtf_gradsync.tools.train.model import ModelSettings


class Sample(NamedTuple):
    """A prompt, and the text that the model wrote after it."""

    prompt: str
    continuation: str


# Not of these: line breaks and tabs, which move no cursor backwards.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    r"""Returns a text with escapes such as \x1b for characters that a terminal would obey."""
    return _CONTROL.sub(lambda found: ascii(found.group())[1:-1], text)


@gin.configurable("sample", module="mtf_gradsync.train")
@dataclasses.dataclass(frozen=True)
class Sampling:
    """The settings for continuing texts by a language model; gin binds them on ``train.sample``.

    To write one token, the whole model passes over the batch once, on the training mesh. This way
    of writing needs no graph besides the graph of the evaluation, and suits each Unitransformer
    that a config can describe. For a large model this way of writing is slow, and
    ``Unitransformer.sample_autoregressive`` on a machine that serves the model is better.

    Attributes:
      num_samples: how many held-out sequences to continue, 0 for none; at most one batch.
      prompt_tokens: how many tokens of each held-out sequence are given to the model.
      max_tokens: how many tokens the model writes after the prompt. When the model's sequence is
        full, the model goes on with the later half of the sequence as context.
      temperature: 0 takes the most likely token, 1 draws from the model's distribution.
      keep_top_k: how many of the most likely tokens to choose from; 0 for all.
      seed: seed of the random numbers by which tokens are chosen.
    """

    num_samples: int = 2
    prompt_tokens: int = 32
    max_tokens: int = 160
    temperature: float = 0.5
    keep_top_k: int = 0
    seed: int = 0

    def check(self, length: int) -> None:
        """Raises ConfigError if a setting is not possible for sequences of `length` tokens."""
        for name, least in {
            "num_samples": 0, "prompt_tokens": 1, "max_tokens": 1, "keep_top_k": 0, "seed": 0
        }.items():  # fmt: skip
            value = getattr(self, name)
            if not is_whole_number(value, least):
                raise ConfigError(
                    f"train.sample.{name} must be a whole number of {least} or more; got {value!r}"
                )
        if self.seed >= _SEEDS:
            raise ConfigError(f"train.sample.seed must be less than 2**32; got {self.seed}")
        if not is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f"train.sample.temperature must be a number of 0 or more; got {self.temperature!r}"
            )
        if self.num_samples and self.prompt_tokens >= length:
            raise ConfigError(
                f"train.sample.prompt_tokens must leave room in a sequence of {length} tokens; "
                f"got {self.prompt_tokens}"
            )


# numpy's RandomState takes a number of 32 bits.
_SEEDS = 2**32


def sample(evaluator: Evaluator, settings: Sampling) -> list[Sample]:
    """Continues the beginnings of held-out sequences by the evaluator's model.

    The continued sequences are spread over the evaluator's first batch. Returns fewer than
    ``settings.num_samples`` samples if this batch has fewer sequences that can be continued.
    `evaluator` must have restored the variables of the model.
    """
    vocabulary = transformer_utils().targets_vocabulary(evaluator.settings.vocabulary)
    # Decided before writing, because a full sequence has no place for a continuation.
    given = np.array(evaluator.batches[0]["targets"])[:, : settings.prompt_tokens]
    rows = np.flatnonzero(np.all(given > 0, axis=1))
    num_samples = min(settings.num_samples, len(rows))
    if not num_samples:
        return []
    # Spread over the batch, so that the prompts are not neighbours in one text.
    rows = rows[((np.arange(num_samples) + 0.5) * len(rows) / num_samples).astype(int)]
    prompts = given[rows]
    written = _continue_prompts(evaluator, prompts, settings)
    return [
        Sample(prompt=vocabulary.decode(prompt), continuation=vocabulary.decode(ids))
        for prompt, ids in zip(prompts.tolist(), written)
    ]


def sample_after(
    model: ModelSettings,
    checkpoint: str,
    prompt: str,
    settings: Sampling,
    with_averages: bool = False,
) -> list[Sample]:
    """Continues the text `prompt` by the model of a checkpoint, whatever runtime has made it.

    `model` has the settings of the model, and `checkpoint` is the checkpoint's path. Returns
    ``settings.num_samples`` continuations of `prompt`. If the prompt is longer than the model's
    sequence, only the end of the prompt is used. If `with_averages` is set, the model's variables
    have the values of the moving averages in the checkpoint.
    """
    if model.model_type != "lm":
        raise ConfigError(
            f'train.run.model_type = "{model.model_type}" cannot continue a text; "lm" can'
        )
    vocabulary = transformer_utils().targets_vocabulary(model.vocabulary)
    length = model.sequence_length["targets"]
    ids = list(vocabulary.encode(prompt))
    # The end of a long prompt: as much as a full sequence keeps when it goes on.
    context = ids if len(ids) < length else ids[-(length // 2) :]
    # As few sequences as the mesh can split.
    least = model.mesh.num_parts("batch") * max(1, model.outer_batch_size)
    batch_size = -(-settings.num_samples // least) * least
    model = model._replace(batch_size=batch_size, mesh=model.mesh.on_one_process())
    model.mesh.check_devices()
    batch = {"targets": np.full([batch_size, length], PAD_ID, np.int32)}
    config = session_config(num_cpu_devices=model.mesh.num_cpu_devices)
    prompts = np.tile(np.array(context, np.int32), [settings.num_samples, 1])
    with Evaluator(model, [batch], config, with_averages) as evaluator:
        evaluator.restore(checkpoint, os.path.dirname(checkpoint))
        written = _continue_prompts(evaluator, prompts, settings)
    return [Sample(prompt, vocabulary.decode(one)) for one in written]


def _continue_prompts(
    evaluator: Evaluator, prompts: np.ndarray, settings: Sampling
) -> list[list[int]]:
    """Returns a list of the ids that the model writes after each prompt.

    `evaluator` computes the model's predictions. `prompts` are ids ``[samples, tokens]``.
    `settings` says how many ids the model writes, and how each id is chosen from the model's
    distribution.
    """
    length = evaluator.settings.sequence_length["targets"]
    random = np.random.RandomState(settings.seed)
    count, position = prompts.shape
    targets = np.full([evaluator.settings.batch_size, length], PAD_ID, np.int32)
    targets[:count, :position] = prompts
    written: list[list[int]] = [[] for _ in prompts]
    for _ in range(settings.max_tokens):
        if position == length:
            position = length // 2
            targets[:, :position] = targets[:, length - position :]
            targets[:, position:] = PAD_ID
        logits = evaluator.next_logits({"targets": targets}, position)
        for row, ids in enumerate(written):
            targets[row, position] = _draw(logits[row], settings, random)
            ids.append(int(targets[row, position]))
        position += 1
    return written


def _draw(logits: np.ndarray, settings: Sampling, random: np.random.RandomState) -> int:
    logits = logits.astype(np.float64)
    # Padding is not a word: it would also end the reader's view of the sequence.
    logits[PAD_ID] = -np.inf
    if settings.temperature == 0:
        return int(np.argmax(logits))
    if settings.keep_top_k:
        logits[logits < np.sort(logits)[-settings.keep_top_k :][0]] = -np.inf
    weights = np.exp((logits - np.max(logits)) / settings.temperature)
    return int(random.choice(len(weights), p=weights / np.sum(weights)))
