"""Texts to train on: where they come from, and which part of them is held out.

Without TensorFlow, so that ``mtf-gradsync init`` answers at once.
"""

from __future__ import annotations

import logging
import re
import zlib
from pathlib import Path
from typing import Sequence

from mtf_gradsync._common import ConfigError, counted

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


def read_files(files: Sequence[str], setting: str = "text_files.files") -> dict[str, str]:
    """Reads UTF-8 text files; returns their texts by name. Errors name the `setting`."""
    if isinstance(files, str) or not files:
        raise ConfigError(f"{setting} must be a list of file names, got {files!r}")
    documents = {}
    for name in files:
        try:
            documents[name] = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{setting}: cannot read {name!r} as UTF-8: {error}") from error
        if not documents[name].strip():
            raise ConfigError(f"{setting}: {name!r} is empty")
    return documents


def check_length(documents: dict[str, str], held_out_every: int, sequence_length: int) -> None:
    """Raises a ConfigError if both splits of a text do not have a sequence of bytes each."""
    for split in ("train", "validation"):
        texts = split_documents(documents, split, held_out_every)
        tokens = sum(len(text.encode("utf-8")) + 1 for text in texts)  # 1: the end of a document
        if tokens <= sequence_length:
            raise ConfigError(too_short(split, tokens, sequence_length, documents))


def too_short(
    split: str, tokens: int, sequence_length: int, documents: dict[str, str] | None = None
) -> str:
    """Returns what to say of a split that has less than one sequence of tokens."""
    of = f" of {_named(documents)}" if documents else ""
    return (
        f"The {split} split{of} has {tokens} tokens, less than one window of "
        f"train.run.sequence_length = {sequence_length}. {_MORE}, or shorter sequences"
    )


_MORE = "Give more text (some thousand characters at least)"


def _named(documents: dict[str, str]) -> str:
    if not documents:
        return "no text"
    return f"{counted(list(documents), 'text')} ({sum(map(len, documents.values())):,} characters)"


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
            f"The {split} split is empty: {_named(documents)} with held_out_every="
            f"{held_out_every} leaves nothing for it. {_MORE}"
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
