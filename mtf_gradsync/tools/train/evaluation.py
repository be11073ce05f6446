"""What a checkpoint scores, beside a baseline that knows only frequencies, and what it writes."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import Any, Dict, List, NamedTuple, Sequence

import gin
import numpy as np

from mtf_gradsync.extension import (
    ConfigError,
    NoAveragesError,
    TrainingError,
    first_line,
    is_number,
    is_whole_number,
    mtf,
    session_config,
    tf,
)
from mtf_gradsync.runtimes.saving import check_has
from mtf_gradsync.runtimes.starting import UNREADABLE, Start
from mtf_gradsync.tools.train.data.vocabulary import PAD_ID
from mtf_gradsync.tools.train.model import MeshModel, ModelSettings


class EvalGraph(NamedTuple):
    """The tensors by which a session scores batches and predicts single targets.

    A session feeds int32 ``[batch_size, length]`` to the placeholders `features`, by feature name,
    and for `next_logits` an int32 scalar to `position`. `cross_entropy` is float32
    ``[batch..., length]``, nats of every target, 0 for padding; `next_logits` is float32
    ``[batch..., vocab]``, the prediction of the target at `position`.
    """

    lowering: Any
    features: dict[str, tf.Tensor]
    cross_entropy: tf.Tensor
    position: tf.Tensor
    next_logits: tf.Tensor


def build_eval_graph(settings: ModelSettings, feature_names: list[str]) -> EvalGraph:
    """Adds the model without dropout, auxiliary losses and update to the default graph.

    `feature_names` are those of the batches that will be fed.
    """
    features = {
        name: tf.placeholder(
            tf.int32, [settings.batch_size, settings.feature_length(name)], name=name
        )
        for name in feature_names
    }
    model = MeshModel(settings)
    mtf_features = model.import_features(features)
    targets = mtf_features["targets"]
    logits, _ = model(mtf_features, "eval")
    logits = mtf.cast(logits, tf.float32)
    vocab_dim = logits.shape.dims[-1]
    # Padding has id 0; negative ids mark targets without loss.
    cross_entropy = mtf.layers.softmax_cross_entropy_with_logits(
        logits, mtf.maximum(targets, 0), vocab_dim
    ) * mtf.cast(mtf.greater(targets, 0), tf.float32)
    position = tf.placeholder(tf.int32, [], name="position")
    next_logits = mtf.gather(
        logits,
        mtf.import_fully_replicated(model.mesh, position, mtf.Shape([]), name="position"),
        targets.shape.dims[-1],
    )
    cross_entropy = mtf.anonymize(cross_entropy)
    next_logits = mtf.anonymize(next_logits)
    lowering = model.lower()
    return EvalGraph(
        lowering=lowering,
        features=features,
        cross_entropy=lowering.export_to_tf_tensor(cross_entropy),
        position=position,
        next_logits=lowering.export_to_tf_tensor(next_logits),
    )


Batches = List[Dict[str, np.ndarray]]


class Score(NamedTuple):
    """How well targets were predicted: `nats` is the sum of their negative log-likelihoods.

    `tokens` counts the targets without padding, `num_bytes` the bytes of text they stand for.
    """

    nats: float
    tokens: int
    num_bytes: int

    @property
    def nats_per_token(self) -> float:
        """Cross entropy in nats per target."""
        return self.nats / max(1, self.tokens)

    @property
    def perplexity(self) -> float:
        """Perplexity per token: the size of a fair die that would be as hard to guess."""
        return math.exp(min(self.nats_per_token, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Cross entropy in bits per byte of text, which can be compared between vocabularies."""
        return self.nats / math.log(2) / max(1, self.num_bytes)


class Evaluator:
    """Scores batches with the variables of a checkpoint, in a graph and session of its own."""

    def __init__(
        self,
        settings: ModelSettings,
        batches: Batches,
        config: tf.ConfigProto,
        with_averages: bool = False,
    ):
        """Builds the graph for at least one batch; `restore` gives the variables their values.

        With with_averages it restores moving averages in place of the variables.
        """
        self.settings = settings
        self.batches = batches
        self._with_averages = with_averages
        self._vocabulary = _of_targets(settings.vocabulary)
        self._num_bytes = _count_bytes(self._vocabulary, batches)
        with tf.Graph().as_default() as graph:
            self._graph: EvalGraph = build_eval_graph(settings, sorted(batches[0]))
            self._variables = tf.global_variables()
            self._saver = tf.train.Saver(self._variables)
            self._masters_to_slices = self._graph.lowering.copy_masters_to_slices()
        self._session = tf.Session(graph=graph, config=config)

    def restore(self, path: str, model_dir: str) -> None:
        """Restores the variables from a checkpoint."""
        check_has(path, self._variables, model_dir)
        try:
            start = Start(path, with_averages=self._with_averages)
            with self._session.graph.as_default(), start.restorable() as restored:
                self._saver.restore(self._session, restored)
        except NoAveragesError as error:
            raise ConfigError(str(error)) from error
        except UNREADABLE as error:
            raise TrainingError(
                f"The checkpoint {path} cannot be read any more: {first_line(error)}"
            ) from error
        self._session.run(self._masters_to_slices)

    def score(self) -> Score:
        """Returns the score of all held-out batches."""
        nats, tokens = 0.0, 0
        for batch in self.batches:
            cross_entropy = self._run(self._graph.cross_entropy, batch)
            nats += float(np.sum(cross_entropy, dtype=np.float64))
            tokens += int(np.sum(batch["targets"] > 0))
        return Score(nats, tokens, self._num_bytes)

    def next_logits(self, batch: dict[str, np.ndarray], position: int) -> np.ndarray:
        """Returns float32 logits ``[batch_size, vocab_size]`` of the targets at a position.

        Targets from the position on have no influence.
        """
        logits = self._run(self._graph.next_logits, batch, {self._graph.position: position})
        # Mesh-TensorFlow pads the vocabulary.
        return logits.reshape(-1, logits.shape[-1])[:, : self._vocabulary.vocab_size]

    def close(self) -> None:
        """Closes the session."""
        self._session.close()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *unused_exception: Any) -> None:
        self.close()

    def _run(self, fetch: tf.Tensor, batch: dict[str, np.ndarray], more: Any = None) -> np.ndarray:
        feed = {self._graph.features[name]: array for name, array in batch.items()}
        return self._session.run(fetch, {**feed, **(more or {})})


def unigram_score(train: Batches, held_out: Batches, vocabulary: Any) -> Score:
    """Scores held-out targets by how often each occurs in training targets, add-one smoothed."""
    vocabulary = _of_targets(vocabulary)
    size = vocabulary.vocab_size
    counts = _count_ids(train, size)
    probabilities = (counts + 1.0) / (counts.sum() + size)
    held_out_counts = _count_ids(held_out, size)
    return Score(
        nats=float(-np.sum(held_out_counts * np.log(probabilities))),
        tokens=int(held_out_counts.sum()),
        num_bytes=_count_bytes(vocabulary, held_out),
    )


def _of_targets(vocabulary: Any) -> Any:
    """Returns the vocabulary of targets, where there is an (inputs, targets) pair."""
    return vocabulary[-1] if isinstance(vocabulary, tuple) else vocabulary


def _count_bytes(vocabulary: Any, batches: Batches) -> int:
    """Returns how many bytes of text the targets of batches stand for."""
    rows = [row for batch in batches for row in batch["targets"]]
    if hasattr(vocabulary, "num_bytes"):
        return sum(vocabulary.num_bytes(row) for row in rows)
    return sum(
        len(str(vocabulary.decode([int(i) for i in row if i > 0])).encode("utf-8")) for row in rows
    )


def _count_ids(batches: Sequence[dict[str, np.ndarray]], size: int) -> np.ndarray:
    counts = np.zeros([size], np.float64)
    for batch in batches:
        targets = batch["targets"]
        counts += np.bincount(targets[targets > 0].reshape(-1), minlength=size)[:size]
    return counts


class Sample(NamedTuple):
    """A prompt, and the text that the model wrote after it."""

    prompt: str
    continuation: str


# Not of these: line breaks and tabs, which move no cursor backwards.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""Returns a text with escapes such as \x1b for characters that a terminal would obey."""
    return _CONTROL.sub(lambda found: ascii(found.group())[1:-1], text)


@gin.configurable("sample", module="mtf_gradsync.train")
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a language model continues texts; gin binds its fields on ``train.sample``.

    Every token takes a pass of the whole model over the batch, on the training mesh. That needs
    no second graph and runs whatever Unitransformer the config describes; a large model wants
    ``Unitransformer.sample_autoregressive`` and a machine to serve it.

    Attributes:
      num_samples: how many held-out sequences to continue, 0 for none; at most one batch.
      prompt_tokens: how many of their tokens are given.
      max_tokens: how many are written. When the model's sequence is full, it goes on with the
        later half of it as context.
      temperature: 0 takes the most likely token, 1 draws from the model's distribution.
      keep_top_k: draw from this many most likely tokens only; 0 for all.
      seed: seed of the draws.
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
    """Continues the beginnings of held-out sequences, by an evaluator with restored variables."""
    vocabulary = _of_targets(evaluator.settings.vocabulary)
    # Decided before writing, because a full sequence has no place for a continuation.
    given = np.array(evaluator.batches[0]["targets"])[:, : settings.prompt_tokens]
    rows = np.flatnonzero(np.all(given > 0, axis=1))
    num_samples = min(settings.num_samples, len(rows))
    if not num_samples:
        return []
    # Spread over the batch, so that the prompts are not neighbours in one text.
    rows = rows[((np.arange(num_samples) + 0.5) * len(rows) / num_samples).astype(int)]
    prompts = given[rows]
    written = _write_after(evaluator, prompts, settings)
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
    """Continues a text by the model of a checkpoint, of any runtime.

    Where the prompt does not fit into the model's sequence, its end counts. With with_averages the
    checkpoint's moving averages replace the variables.
    """
    if model.model_type != "lm":
        raise ConfigError(
            f'train.run.model_type = "{model.model_type}" cannot continue a text; "lm" can'
        )
    vocabulary = _of_targets(model.vocabulary)
    length = model.sequence_length["targets"]
    ids = list(vocabulary.encode(prompt))
    # As much as a sequence keeps where it goes on.
    context = ids if len(ids) < length else ids[-(length // 2) :]
    # As few sequences as the mesh can split.
    least = model.mesh.split("batch") * max(1, model.outer_batch_size)
    batch_size = -(-settings.num_samples // least) * least
    model = model._replace(batch_size=batch_size, mesh=model.mesh.on_one_process())
    model.mesh.check_devices()
    batch = {"targets": np.full([batch_size, length], PAD_ID, np.int32)}
    config = session_config(num_cpu_devices=model.mesh.num_cpu_devices)
    prompts = np.tile(np.array(context, np.int32), [settings.num_samples, 1])
    with Evaluator(model, [batch], config, with_averages) as evaluator:
        evaluator.restore(checkpoint, os.path.dirname(checkpoint))
        written = _write_after(evaluator, prompts, settings)
    return [Sample(prompt, vocabulary.decode(one)) for one in written]


def _write_after(evaluator: Evaluator, prompts: np.ndarray, settings: Sampling) -> list[list[int]]:
    """Returns the ids that the model writes after each of the prompts ``[samples, tokens]``."""
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
