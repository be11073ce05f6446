"""Data sets: functions from (sequence_length, vocabulary, dataset_split) to examples.

The signature is that of ``mesh_tensorflow.transformer.utils.run``: a data set of single examples,
dicts of integer vectors, already padded or packed to ``sequence_length``.
"""

from __future__ import annotations

import itertools
import logging
import re
import zlib
from pathlib import Path
from typing import Any, Callable, Sequence

import gin
import numpy as np

from mtf_gradsync._common import ConfigError, first_line
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.train.data.vocabulary import EOS_ID, PAD_ID

_logger = logging.getLogger(__name__)

# Shorter paragraphs ("Note:", a lone heading) recur everywhere and do not identify their text.
_MIN_SHARED_PARAGRAPH = 40


def read_python_topics() -> dict[str, str]:
    """Returns the language reference that Python's ``help()`` shows, by topic.

    It ships with CPython (``pydoc_data.topics``), about half a megabyte of English and code. The
    text changes a little with every Python version, and so do figures measured on it.

    Raises:
      ConfigError: this Python was installed without it.
    """
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise ConfigError(
            "This Python has no pydoc_data (some distributions strip it), the text that "
            "python_topics trains on; use another Python, or bind "
            "train.run.train_dataset_fn = @text_files"
        ) from error
    return {str(name): str(text) for name, text in topics.topics.items()}


def read_files(files: Sequence[str]) -> dict[str, str]:
    """Reads UTF-8 text files; returns their texts by name."""
    if isinstance(files, str) or not files:
        raise ConfigError(f"text_files.files must be a list of file names, got {files!r}")
    documents = {}
    for name in files:
        try:
            documents[name] = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"text_files.files: cannot read {name!r}: {error}") from error
        if not documents[name].strip():
            raise ConfigError(f"text_files.files: {name!r} is empty")
    return documents


def split_documents(documents: dict[str, str], split: str, held_out_every: int) -> list[str]:
    """Returns the documents of the split "train" or "validation", in the order of their names.

    Whether a document is held out, about one in held_out_every, depends on its name alone. Where
    those would be less than half or more than twice ``1 / held_out_every`` of the text (few
    documents, or of unequal lengths), the last part of each document is held out instead, from the
    nearest paragraph or line on. Documents quote each other, so paragraphs of the held-out part are
    removed from the training text. How long both are is logged.
    """
    if split not in ("train", "validation"):
        raise ConfigError(f'dataset_split must be "train" or "validation", got {split!r}')
    if held_out_every < 2:
        raise ConfigError(f"held_out_every must be at least 2, got {held_out_every!r}")
    given, held_out = _divided(documents, held_out_every)
    seen = {_paragraph_key(one) for text in held_out for one in _paragraphs(text)} - {""}
    train, removed = [], 0
    for text in given:
        kept = [one for one in _paragraphs(text) if _paragraph_key(one) not in seen]
        removed += sum(map(len, _paragraphs(text))) - sum(map(len, kept))
        train.append("\n\n".join(kept))
    left, held = sum(map(len, given)) - removed, sum(map(len, held_out))
    if removed and left < held:
        raise ConfigError(
            f"{removed:,} of the {left + removed:,} characters to train on are paragraphs that "
            "the held-out part has, too: the text repeats itself. Take the repetitions out, or "
            "give train.run.eval_dataset_fn a text of its own"
        )
    texts = train if split == "train" else held_out
    if not any(text.strip() for text in texts):
        raise ConfigError(
            f"The {split} split is empty: {len(documents)} documents with "
            f"held_out_every={held_out_every} leave no text for it"
        )
    also = f"; {removed:,} in both are not trained on" if removed else ""
    _logger.info(
        "The text has %s characters to train on and %s held out (%.1f %%)%s",
        f"{left:,}", f"{held:,}", 100 * held / (left + held), also,
    )  # fmt: skip
    return texts


def _divided(documents: dict[str, str], held_out_every: int) -> tuple[list[str], list[str]]:
    """Returns the texts to train on, and those that are held out."""
    names = sorted(documents)
    chosen = {name for name in names if zlib.crc32(name.encode()) % held_out_every == 0}
    share, total = 1 / held_out_every, sum(map(len, documents.values()))
    length = sum(len(documents[name]) for name in chosen)
    if total * share / 2 <= length <= total * min(2 * share, (1 + share) / 2):
        train = [documents[name] for name in names if name not in chosen]
        return train, [documents[name] for name in names if name in chosen]
    parts = [_cut_in_two(documents[name], held_out_every) for name in names]
    return [first for first, _ in parts], [last for _, last in parts]


def _cut_in_two(text: str, held_out_every: int) -> tuple[str, str]:
    """Returns a text without its last part, and that part.

    Its length is ``1 / held_out_every`` of the text, or by up to a half more or less, so that it
    begins with a paragraph, or at least with a line.
    """
    length = len(text) // held_out_every
    target = len(text) - length
    earliest, latest = target - length // 2, target + length // 2
    for end in (_PARAGRAPH_END, _LINE_END):
        ends = [match.start() for match in end.finditer(text, earliest, latest)]
        if ends:
            cut = max((at for at in ends if at <= target), default=ends[0])
            return text[:cut], text[cut:]
    return text[:target], text[target:]


_PARAGRAPH_END, _LINE_END = re.compile(r"\n[ \t]*\n"), re.compile(r"\n")


def _paragraphs(text: str) -> list[str]:
    return _PARAGRAPH_END.split(text)


def _paragraph_key(paragraph: str) -> str:
    """Returns a key that equal paragraphs share, "" for a paragraph too short to matter."""
    key = " ".join(paragraph.split())
    return key if len(key) >= _MIN_SHARED_PARAGRAPH else ""


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
        raise ConfigError(
            f"The {dataset_split} split has {len(ids)} tokens, less than one window of "
            f"train.run.sequence_length = {length}"
        )
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
