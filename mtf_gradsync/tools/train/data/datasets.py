"""Data sets: functions from (sequence_length, vocabulary, dataset_split) to examples.

The functions have the arguments and results that ``mesh_tensorflow.transformer.utils.run`` wants.
Each returns a data set of single examples: dicts of integer vectors, already padded or packed to
``sequence_length``.
"""

from __future__ import annotations

import itertools
import tempfile
from typing import Any, Callable, Iterator, Sequence

import gin
import numpy as np

from mtf_gradsync.extension import tf
from mtf_gradsync.runtimes._common import ConfigError, first_line
from mtf_gradsync.tools.train.data.texts import (
    pieces_of,
    read_files,
    read_python_topics,
    split_documents,
    too_short_error,
)
from mtf_gradsync.tools.train.data.vocabulary import EOS_ID, PAD_ID

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
    part: int = 0,
    parts: int = 1,
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
      part: the number of the first of the windows of "train" that the data set has. `start` counts
        only windows that the data set has.
      parts: the data set has every `parts`-th window of "train"; 1 for all windows.

    Returns:
      A data set of ``{"targets": int32[sequence_length["targets"]]}``.
    """
    documents = split_documents(read_python_topics(), dataset_split, held_out_every=held_out_every)
    return text_windows(
        documents, sequence_length, vocabulary, dataset_split, seed, start, part, parts
    )


@gin.configurable(module="mtf_gradsync.train")
def text_files(
    sequence_length: dict[str, int],
    vocabulary: Any,
    dataset_split: str,
    files: Sequence[str] = gin.REQUIRED,
    seed: int = 0,
    held_out_every: int = 10,
    start: Any = 0,
    part: int = 0,
    parts: int = 1,
) -> tf.data.Dataset:
    """Returns language-model examples from text files, as windows of `sequence_length` tokens.

    Args:
      sequence_length: length of each feature; "targets" is used.
      vocabulary: turns text into ids.
      dataset_split: "train": windows at random places, without end. "validation": the held-out
        files, or parts of files, cut into windows, once.
      files: names of UTF-8 text files, each one document.
      seed: seed of the random windows.
      held_out_every: about one file in this many is held out. If files are few, or of unequal
        lengths, the last part of each file is held out instead.
      start: the number of the first window of "train"; an int64 tf scalar, or a number.
      part: the number of the first of the windows of "train" that the data set has. `start` counts
        only windows that the data set has.
      parts: the data set has every `parts`-th window of "train"; 1 for all windows.

    Returns:
      A data set of ``{"targets": int32[sequence_length["targets"]]}``.
    """
    documents = split_documents(read_files(files), dataset_split, held_out_every=held_out_every)
    return text_windows(
        documents, sequence_length, vocabulary, dataset_split, seed, start, part, parts
    )


def text_windows(
    documents: Sequence[bytes],
    sequence_length: dict[str, int],
    vocabulary: Any,
    dataset_split: str,
    seed: int,
    start: Any = 0,
    part: int = 0,
    parts: int = 1,
) -> tf.data.Dataset:
    """Returns a data set of windows of documents, examples ``{"targets": int32[length]}``.

    The length of a window is the length of "targets" in `sequence_length`. An end-of-document id
    follows each document. For the split "train" the windows are at random places, without end; the
    place of window n is a function of `seed` and n. Of these windows the data set has those with
    the numbers `part`, `part + parts`, `part + 2 * parts` and so on, but not the first `start` of
    them. For any other split the data set has all windows once, side by side. `documents` are
    UTF-8. `vocabulary` turns text into ids; it encodes a long document in pieces, each of which
    ends after a line if possible.
    """
    length = sequence_length["targets"]
    ids = _encode_documents(documents, vocabulary)
    if len(ids) <= length:
        raise ConfigError(too_short_error(dataset_split, len(ids), length))
    read = _window_reader(ids, length)
    if dataset_split == "train":
        return _random_windows(read, len(ids) - length + 1, seed, start * parts + part, parts)
    windows = tf.data.Dataset.range(-(-len(ids) // length))
    return mapped(windows, lambda n: {"targets": read(n * length)})


# Bytes of ids from which on they are kept in a file, of which a window is read when it is drawn.
# TensorFlow copies a constant some ten times until it is in a function of a data set.
_IN_A_FILE = 4 << 20


def _encode_documents(documents: Sequence[bytes], vocabulary: Any) -> np.ndarray:
    """Returns the ids of all documents in one vector, each followed by an end-of-document id.

    `vocabulary` turns text into ids. The dtype of the vector is the smallest that holds all ids of
    the vocabulary. A large vector is a memory-mapped file, which is deleted together with the
    vector.
    """
    dtype = np.min_scalar_type(vocabulary.vocab_size - 1)

    def encoded(document: bytes) -> Iterator[np.ndarray]:
        for piece in pieces_of(document):
            ids = np.array(vocabulary.encode(piece.decode("utf-8")), np.int64)
            if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary.vocab_size:
                raise ConfigError(
                    f"train.run.vocabulary encodes a text as ids from {ids.min()} to {ids.max()}, "
                    f"and its vocab_size is {vocabulary.vocab_size}"
                )
            yield ids.astype(dtype)
        yield np.array([EOS_ID], dtype)

    parts: list[np.ndarray] = []
    size = 0
    chunks = itertools.chain.from_iterable(map(encoded, documents))
    for chunk in chunks:
        parts.append(chunk)
        size += chunk.nbytes
        if size >= _IN_A_FILE:
            break
    else:
        return np.concatenate(parts)
    try:
        with tempfile.TemporaryFile() as file:
            for chunk in itertools.chain(parts, chunks):
                file.write(chunk.tobytes())
            file.flush()
            return np.memmap(file, dtype, mode="r")
    except OSError as error:
        raise ConfigError(
            f"The ids of a long text need a temporary file, which cannot be written in "
            f"{tempfile.gettempdir()}: {error.strerror or error}. Set TMPDIR to a folder with room"
        ) from error


def _window_reader(ids: np.ndarray, length: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function that takes the place where a window begins and returns its ids.

    The place where a window begins is an integer tf scalar, an index into `ids`. The ids of the
    window are an int32 tensor of `length` elements. A window that goes beyond the last id is
    padded.
    """

    def of_file(begin: int) -> np.ndarray:
        window = np.full([length], PAD_ID, np.int32)
        found = ids[begin : begin + length]
        window[: len(found)] = found
        return window

    if isinstance(ids, np.memmap):
        return lambda begin: tf.ensure_shape(
            tf.numpy_function(of_file, [begin], tf.int32), [length]
        )
    tokens = tf.constant(np.pad(ids, [0, -len(ids) % length], constant_values=PAD_ID))
    return lambda begin: tf.reshape(
        tf.cast(tf.slice(tokens, [begin], [length]), tf.int32), [length]
    )


def _random_windows(
    read: Callable[[tf.Tensor], tf.Tensor], num_begins: int, seed: int, start: Any, every: int
) -> tf.data.Dataset:
    index = tf.int32 if num_begins <= tf.int32.max else tf.int64

    def window(n: tf.Tensor) -> dict[str, tf.Tensor]:
        # Stateless, so that a restarted run can take up the data at any step.
        begin = tf.random.stateless_uniform(
            [], seed=tf.stack([tf.constant(seed, tf.int64), n]), maxval=num_begins, dtype=index
        )
        return {"targets": read(begin)}

    return mapped(tf.data.Dataset.range(start, np.iinfo(np.int64).max, every), window)


def mapped(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Returns `dataset` with `function` applied to each example, without the slow AutoGraph."""
    return dataset.map(tf.autograph.experimental.do_not_convert(function))


def read_batches(
    make_dataset: Callable[[], tf.data.Dataset],
    batch_size: int,
    max_batches: int | None,
    name: str = "the data set",
) -> list[dict[str, np.ndarray]]:
    """Reads the first batches of a data set, as arrays ``[batch_size, length]`` by feature name.

    `make_dataset` is called in a graph of its own and returns a data set of single examples. The
    last batch is filled up with padding. If `max_batches` is None, all batches are read. `name` is
    a name for the source of the data set in the texts of errors, such as a binding.
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
