"""Scores checkpoints on held-out data, beside a baseline that knows only token frequencies."""

from __future__ import annotations

import math
from typing import Any, ContextManager, Dict, List, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.extension import mtf, tf
from mtf_gradsync.runtimes._common import ConfigError, TrainingError, first_line
from mtf_gradsync.runtimes.checkpoints import NoAveragesError
from mtf_gradsync.runtimes.saving import check_has_variables
from mtf_gradsync.runtimes.starting import UNREADABLE, Start
from mtf_gradsync.tools.train.config import transformer_utils
from mtf_gradsync.tools.train.model import MeshModel, ModelSettings


class EvalGraph(NamedTuple):
    """The tensors by which a session scores batches and predicts single targets.

    `features` are placeholders by feature name, to which a session feeds int32 arrays
    ``[batch_size, length]``. `cross_entropy` is float32 ``[batch..., length]``: the loss of every
    target in nats, 0 for padding. To predict single targets, a session also feeds an int32 scalar
    to the placeholder `position`, and fetches `next_logits`, float32 ``[batch..., vocab]``: the
    logits of the targets at this position.
    """

    lowering: Any
    features: dict[str, tf.Tensor]
    cross_entropy: tf.Tensor
    position: tf.Tensor
    next_logits: tf.Tensor


def build_eval_graph(settings: ModelSettings, feature_names: list[str]) -> EvalGraph:
    """Adds the model to the default graph, without dropout, auxiliary losses and update.

    `feature_names` are the names of the features in the batches that will be fed to the graph.
    `settings` describe the model and its mesh. Returns the tensors to feed and to fetch.
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
    """The quality of predictions: `nats` is the sum of the targets' negative log-likelihoods.

    `tokens` is the number of targets that are not padding, and `num_bytes` is the number of bytes
    of the text that these targets stand for.
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


class Evaluator(ContextManager["Evaluator"]):
    """A scorer of batches with a checkpoint's variables, in its own graph and session."""

    def __init__(
        self,
        settings: ModelSettings,
        batches: Batches,
        config: tf.ConfigProto,
        with_averages: bool = False,
    ):
        """Builds the model's graph and opens a session; `restore` gives the variables values.

        `settings` describe the model and its mesh. `batches` are the held-out batches to score, at
        least one. `config` has the settings of the session. If `with_averages` is set, `restore`
        gives the variables the values of the moving averages that an optimizer has kept.
        """
        self.settings = settings
        self.batches = batches
        self._with_averages = with_averages
        self._vocabulary = transformer_utils().targets_vocabulary(settings.vocabulary)
        self._num_bytes = _count_bytes(self._vocabulary, batches)
        with tf.Graph().as_default() as graph:
            self._graph: EvalGraph = build_eval_graph(settings, sorted(batches[0]))
            self._variables = tf.global_variables()
            self._saver = tf.train.Saver(self._variables)
            self._masters_to_slices = self._graph.lowering.copy_masters_to_slices()
        self._session = tf.Session(graph=graph, config=config)

    def restore(self, path: str, model_dir: str) -> None:
        """Restores the variables from the checkpoint `path` of the run in model_dir."""
        check_has_variables(path, self._variables, model_dir)
        start = Start(path, with_averages=self._with_averages)
        try:
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
        """Returns float32 logits ``[batch_size, vocab_size]`` of the targets at `position`.

        `batch` has an int32 array ``[batch_size, length]`` for each feature, by name. The targets
        at the position and after it have no influence on the logits.
        """
        logits = self._run(self._graph.next_logits, batch, {self._graph.position: position})
        # Mesh-TensorFlow pads the vocabulary.
        return logits.reshape(-1, logits.shape[-1])[:, : self._vocabulary.vocab_size]

    def close(self) -> None:
        """Closes the session."""
        self._session.close()

    def __exit__(self, *unused_exception: Any) -> None:
        self.close()

    def _run(self, fetch: tf.Tensor, batch: dict[str, np.ndarray], more: Any = None) -> np.ndarray:
        feed = {self._graph.features[name]: array for name, array in batch.items()}
        return self._session.run(fetch, {**feed, **(more or {})})


def unigram_score(train: Batches, held_out: Batches, vocabulary: Any) -> Score:
    """Scores the targets of held-out batches by how often each id occurs in training batches.

    The result is the score, on the batches `held_out`, of a model that gives each id its frequency
    in the batches `train` as probability. One is added to the count of each id, so that no id has
    the probability 0.
    """
    vocabulary = transformer_utils().targets_vocabulary(vocabulary)
    size = vocabulary.vocab_size
    counts = _count_ids(train, size)
    probabilities = (counts + 1.0) / (counts.sum() + size)
    held_out_counts = _count_ids(held_out, size)
    return Score(
        nats=float(-np.sum(held_out_counts * np.log(probabilities))),
        tokens=int(held_out_counts.sum()),
        num_bytes=_count_bytes(vocabulary, held_out),
    )


def _count_bytes(vocabulary: Any, batches: Batches) -> int:
    """Returns how many bytes of text the targets of all batches stand for, by a vocabulary."""
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
