"""Text that a trained language model writes."""

from __future__ import annotations

from typing import NamedTuple

import gin
import numpy as np

from mtf_gradsync.train.data.vocabulary import PAD_ID
from mtf_gradsync.train.errors import ConfigError
from mtf_gradsync.train.evaluation.scores import Evaluator


class Sample(NamedTuple):
    """A prompt, and what the model wrote after it."""

    prompt: str
    continuation: str


@gin.configurable(module="mtf_gradsync.train")
def sample(
    evaluator: Evaluator,
    num_samples: int = 2,
    prompt_tokens: int = 32,
    max_tokens: int = 160,
    temperature: float = 0.5,
    keep_top_k: int = 0,
    seed: int = 0,
) -> list[Sample]:
    """Continues the beginnings of held-out sequences.

    Every token takes a pass of the whole model over the batch, on the training mesh. That needs
    no second graph and runs whatever Unitransformer the config describes; a large model wants
    ``Unitransformer.sample_autoregressive`` and a machine to serve it.

    Args:
      evaluator: a language model with its variables restored.
      num_samples: how many held-out sequences to continue, 0 for none; at most one batch.
      prompt_tokens: how many of their tokens are given.
      max_tokens: how many are written. When the model's sequence is full, it goes on with the
        later half of it as context.
      temperature: 0 takes the most likely token, 1 draws from the model's distribution.
      keep_top_k: draw from this many most likely tokens only; 0 for all.
      seed: of the draws.

    Returns:
      Prompts and continuations.

    Raises:
      ConfigError: if a setting is out of its range.
    """
    length = evaluator.settings.sequence_length["targets"]
    if not 0 < prompt_tokens < length:
        raise ConfigError(
            f"train.sample.prompt_tokens must leave room in a sequence of {length} tokens; "
            f"got {prompt_tokens!r}"
        )
    if temperature < 0 or keep_top_k < 0:
        raise ConfigError(
            "train.sample.temperature and train.sample.keep_top_k must not be negative; "
            f"got {temperature!r} and {keep_top_k!r}"
        )
    vocabulary = evaluator.settings.vocabulary
    random = np.random.RandomState(seed)
    # Fixed before writing, because a full sequence has no place for a continuation.
    targets = np.array(evaluator.batches[0]["targets"])
    targets[:, prompt_tokens:] = PAD_ID
    rows = np.flatnonzero(np.all(targets[:, :prompt_tokens] > 0, axis=1))
    num_samples = min(num_samples, len(rows))
    if not num_samples:
        return []
    # Spread over the batch, so that the prompts are not neighbours in one text.
    rows = rows[((np.arange(num_samples) + 0.5) * len(rows) / num_samples).astype(int)]
    prompts = [targets[row, :prompt_tokens].tolist() for row in rows]
    written: list[list[int]] = [[] for _ in rows]
    position = prompt_tokens
    for _ in range(max_tokens):
        if position == length:
            position = length // 2
            targets[:, :position] = targets[:, length - position :]
            targets[:, position:] = PAD_ID
        logits = evaluator.next_logits({"targets": targets}, position)
        for ids, row in zip(written, rows):
            targets[row, position] = _draw(logits[row], temperature, keep_top_k, random)
            ids.append(int(targets[row, position]))
        position += 1
    return [
        Sample(prompt=vocabulary.decode(prompt), continuation=vocabulary.decode(ids))
        for prompt, ids in zip(prompts, written)
    ]


def _draw(
    logits: np.ndarray, temperature: float, keep_top_k: int, random: np.random.RandomState
) -> int:
    logits = logits.astype(np.float64)
    # Padding is not a word: it would also end the reader's view of the sequence.
    logits[PAD_ID] = -np.inf
    if temperature == 0:
        return int(np.argmax(logits))
    if keep_top_k:
        logits[logits < np.sort(logits)[-keep_top_k:][0]] = -np.inf
    weights = np.exp((logits - np.max(logits)) / temperature)
    return int(random.choice(len(weights), p=weights / np.sum(weights)))
