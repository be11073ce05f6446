"""Data sets: functions from (sequence_length, vocabulary, dataset_split) to examples.

The signature is that of ``mesh_tensorflow.transformer.utils.run``: a data set of single examples,
dicts of integer vectors, already padded or packed to ``sequence_length``.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Sequence

import gin
import numpy as np

from mtf_gradsync._common import ConfigError, first_line
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.train.data.texts import (
    read_files,
    read_python_topics,
    split_documents,
    too_short,
)
from mtf_gradsync.train.data.vocabulary import EOS_ID, PAD_ID

# What mesh_tensorflow.transformer models read; data sets often have more (plain text, ids).
MODEL_FEATURES = (
    "inputs",
    "inputs_position",
    "inputs_segmentation",
    "targets",
    "targets_position",
    "targets_segmentation",
    "targets_subsegmentation",
)


@gin.configurable(module="mtf_gradsync.train")
def python_topics(
    sequence_length: dict[str, int],
    vocabulary: Any,
    dataset_split: str,
    seed: int = 0,
    held_out_every: int = 10,
    start: Any = 0,
) -> tf.data.Dataset:
    """Returns language-model examples from Python's own documentation.

    Args:
      sequence_length: length of each feature; "targets" is used.
      vocabulary: turns text into ids.
      dataset_split: "train": windows at random places, without end. "validation": the held-out
        topics cut into windows, once.
      seed: seed of the random places. The n-th window is a function of seed and n alone.
      held_out_every: about one topic in this many is held out.
      start: the number of the first window of "train"; an int64 tf scalar, or a number.

    Returns:
      A data set of ``{"targets": int32[sequence_length["targets"]]}``.
    """
    documents = split_documents(read_python_topics(), dataset_split, held_out_every=held_out_every)
    return text_windows(documents, sequence_length, vocabulary, dataset_split, seed, start)


@gin.configurable(module="mtf_gradsync.train")
def text_files(
    sequence_length: dict[str, int],
    vocabulary: Any,
    dataset_split: str,
    files: Sequence[str] = gin.REQUIRED,
    seed: int = 0,
    held_out_every: int = 10,
    start: Any = 0,
) -> tf.data.Dataset:
    """Returns language-model examples from text files; otherwise as `python_topics`.

    Args:
      sequence_length: length of each feature; "targets" is used.
      vocabulary: turns text into ids.
      dataset_split: "train" or "validation".
      files: names of UTF-8 text files, each one document.
      seed: seed of the random windows.
      held_out_every: about one file in this many is held out; of few files, or of unequal lengths,
        the last part of each.
      start: the number of the first window of "train"; an int64 tf scalar, or a number.

    Returns:
      A data set of ``{"targets": int32[sequence_length["targets"]]}``.
    """
    documents = split_documents(read_files(files), dataset_split, held_out_every=held_out_every)
    return text_windows(documents, sequence_length, vocabulary, dataset_split, seed, start)


def text_windows(
    documents: Sequence[str],
    sequence_length: dict[str, int],
    vocabulary: Any,
    dataset_split: str,
    seed: int,
    start: Any = 0,
) -> tf.data.Dataset:
    """Cuts documents, with an end-of-document id after each, into ``{"targets": int32[length]}``.

    The length is that of "targets" in sequence_length. The split "train" has random windows without
    end, from number `start` on; any other has all windows once, side by side.
    """
    length = sequence_length["targets"]
    ids = np.array(
        list(itertools.chain.from_iterable([*vocabulary.encode(t), EOS_ID] for t in documents)),
        dtype=np.int32,
    )
    if len(ids) <= length:
        raise ConfigError(too_short(dataset_split, len(ids), length))
    if dataset_split == "train":
        return _random_windows(ids, length, seed, start)
    return _consecutive_windows(ids, length)


def _random_windows(ids: np.ndarray, length: int, seed: int, start: Any) -> tf.data.Dataset:
    def window(n: tf.Tensor) -> dict[str, tf.Tensor]:
        # Stateless, so that a restarted run can take up the data at any step.
        begin = tf.random.stateless_uniform(
            [], seed=tf.stack([tf.constant(seed, tf.int64), n]), maxval=len(ids) - length + 1,
            dtype=tf.int32,
        )  # fmt: skip
        return {"targets": tf.reshape(tf.slice(tokens, [begin], [length]), [length])}

    tokens = tf.constant(ids)
    return mapped(tf.data.Dataset.range(start, np.iinfo(np.int64).max), window)


def _consecutive_windows(ids: np.ndarray, length: int) -> tf.data.Dataset:
    padded = np.full([-(-len(ids) // length) * length], PAD_ID, np.int32)
    padded[: len(ids)] = ids
    return tf.data.Dataset.from_tensor_slices({"targets": padded.reshape(-1, length)})


def mapped(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Returns `dataset.map` of a function without AutoGraph, which takes half a second."""
    return dataset.map(tf.autograph.experimental.do_not_convert(function))


def read_batches(
    make_dataset: Callable[[], tf.data.Dataset],
    batch_size: int,
    max_batches: int | None,
    name: str = "the data set",
) -> list[dict[str, np.ndarray]]:
    """Reads a data set of single examples as batches of arrays ``[batch_size, length]``.

    The last batch is filled up with padding. max_batches of None reads to the end; `name` is the
    binding that errors name.
    """
    batches: list[dict[str, np.ndarray]] = []
    with tf.Graph().as_default():
        dataset = mapped(make_dataset(), _model_features).batch(batch_size)
        iterator = tf.data.make_initializable_iterator(dataset)
        features = iterator.get_next()
        with tf.Session() as session:
            session.run([tf.tables_initializer(), iterator.initializer])
            while max_batches is None or len(batches) < max_batches:
                try:
                    batch = session.run(features)
                except tf.errors.OutOfRangeError:
                    break
                except tf.errors.OpError as error:
                    raise ConfigError(
                        f"{name}: batch {len(batches) + 1} of its data set cannot be read: "
                        f"{type(error).__name__}: {first_line(error)}"
                    ) from error
                batches.append({k: _fill_up(v, batch_size) for k, v in batch.items()})
    return batches


def _model_features(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {key: value for key, value in example.items() if key in MODEL_FEATURES}


def _fill_up(array: np.ndarray, batch_size: int) -> np.ndarray:
    missing = batch_size - array.shape[0]
    return np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1), constant_values=PAD_ID)
