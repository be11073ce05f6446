"""Samples of text from a trained language model."""

from __future__ import annotations

import os
from typing import NamedTuple

import gin
import numpy as np

from mtf_gradsync.session import session_config
from mtf_gradsync.train.data.vocabulary import PAD_ID
from mtf_gradsync.train.errors import ConfigError
from mtf_gradsync.train.evaluation.scores import Evaluator
from mtf_gradsync.train.model import ModelSettings


class Sample(NamedTuple):
    """A prompt, and the text that the model wrote after it."""

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
      seed: seed of the draws.

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
    # Decided before writing, because a full sequence has no place for a continuation.
    given = np.array(evaluator.batches[0]["targets"])[:, :prompt_tokens]
    rows = np.flatnonzero(np.all(given > 0, axis=1))
    num_samples = min(num_samples, len(rows))
    if not num_samples:
        return []
    # Spread over the batch, so that the prompts are not neighbours in one text.
    rows = rows[((np.arange(num_samples) + 0.5) * len(rows) / num_samples).astype(int)]
    prompts = given[rows]
    written = _write_after(evaluator, prompts, max_tokens, temperature, keep_top_k, seed)
    return [
        Sample(prompt=vocabulary.decode(prompt), continuation=vocabulary.decode(ids))
        for prompt, ids in zip(prompts.tolist(), written)
    ]


def sample_after(
    model: ModelSettings,
    checkpoint: str,
    prompt: str,
    num_samples: int = 1,
    max_tokens: int = 160,
    temperature: float = 0.5,
    keep_top_k: int = 0,
    seed: int = 0,
    with_averages: bool = False,
) -> list[Sample]:
    """Continues a text by the model of a checkpoint, of any runtime; the settings are `sample`'s.

    Where the prompt does not fit into the model's sequence, its end counts. With with_averages the
    checkpoint's moving averages replace the variables.
    """
    if model.model_type != "lm":
        raise ConfigError(
            f'train.run.model_type = "{model.model_type}" cannot continue a text; "lm" can'
        )
    length = model.sequence_length["targets"]
    ids = list(model.vocabulary.encode(prompt))
    # As much as a sequence keeps where it goes on.
    context = ids if len(ids) < length else ids[-(length // 2) :]
    # As few sequences as the mesh can split.
    least = model.mesh.split("batch") * max(1, model.outer_batch_size)
    batch_size = -(-num_samples // least) * least
    model = model._replace(batch_size=batch_size, mesh=model.mesh.on_one_process())
    batch = {"targets": np.full([batch_size, length], PAD_ID, np.int32)}
    config = session_config(num_cpu_devices=model.mesh.num_cpu_devices)
    prompts = np.tile(np.array(context, np.int32), [num_samples, 1])
    with Evaluator(model, [batch], config, with_averages) as evaluator:
        evaluator.restore(checkpoint, os.path.dirname(checkpoint))
        written = _write_after(evaluator, prompts, max_tokens, temperature, keep_top_k, seed)
    return [Sample(prompt, model.vocabulary.decode(one)) for one in written]


def _write_after(
    evaluator: Evaluator,
    prompts: np.ndarray,
    max_tokens: int,
    temperature: float,
    keep_top_k: int,
    seed: int,
) -> list[list[int]]:
    """Returns the ids that the model writes after each of the prompts ``[samples, tokens]``."""
    length = evaluator.settings.sequence_length["targets"]
    random = np.random.RandomState(seed)
    count, position = prompts.shape
    targets = np.full([evaluator.settings.batch_size, length], PAD_ID, np.int32)
    targets[:count, :position] = prompts
    written: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_tokens):
        if position == length:
            position = length // 2
            targets[:, :position] = targets[:, length - position :]
            targets[:, position:] = PAD_ID
        logits = evaluator.next_logits({"targets": targets}, position)
        for row, ids in enumerate(written):
            targets[row, position] = _draw(logits[row], temperature, keep_top_k, random)
            ids.append(int(targets[row, position]))
        position += 1
    return written


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
