"""Documents to train on, split into training text and held-out text."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Sequence

from mtf_gradsync.train.errors import ConfigError

# Shorter paragraphs ("Note:", a lone heading) recur everywhere and do not identify their text.
_MIN_SHARED_PARAGRAPH = 40


def python_topics() -> dict[str, str]:
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
    return documents


def split_documents(documents: dict[str, str], split: str, held_out_every: int) -> list[str]:
    """Returns the documents of the split "train" or "validation", in the order of their names.

    Whether a document is held out, about one in held_out_every, depends on its name alone.
    Documents quote each other, so paragraphs of held-out documents are removed from the training
    text. A single document is split at a paragraph instead, its last ``1 / held_out_every`` held
    out.
    """
    if split not in ("train", "validation"):
        raise ConfigError(f'dataset_split must be "train" or "validation", got {split!r}')
    if held_out_every < 2:
        raise ConfigError(f"held_out_every must be at least 2, got {held_out_every!r}")
    if len(documents) == 1:
        documents = _cut_in_two(documents, held_out_every)
        held_out_names = [name for name in documents if name.endswith("#end")]
    else:
        held_out_names = [
            name for name in sorted(documents) if zlib.crc32(name.encode()) % held_out_every == 0
        ]
        # A handful of files may all hash to one side.
        if not held_out_names and documents:
            held_out_names = [max(documents)]
    held_out = [documents[name] for name in held_out_names]
    if split == "validation":
        texts = held_out
    else:
        seen_elsewhere = {
            key for text in held_out for key in map(_paragraph_key, _paragraphs(text)) if key
        }
        texts = [
            "\n\n".join(
                paragraph
                for paragraph in _paragraphs(documents[name])
                if _paragraph_key(paragraph) not in seen_elsewhere
            )
            for name in sorted(documents)
            if name not in held_out_names
        ]
    if not any(text.strip() for text in texts):
        raise ConfigError(
            f"The {split} split is empty: {len(documents)} documents with "
            f"held_out_every={held_out_every} leave no text for it"
        )
    return texts


def _paragraphs(text: str) -> list[str]:
    return re.split(r"\n[ \t]*\n", text)


def _paragraph_key(paragraph: str) -> str:
    """Returns a key that equal paragraphs share, "" for a paragraph too short to matter."""
    key = " ".join(paragraph.split())
    return key if len(key) >= _MIN_SHARED_PARAGRAPH else ""


def _cut_in_two(documents: dict[str, str], held_out_every: int) -> dict[str, str]:
    ((name, text),) = documents.items()
    target = len(text) * (held_out_every - 1) // held_out_every
    cut = text.rfind("\n\n", 0, target)
    cut = target if cut < 0 else cut
    return {f"{name}#start": text[:cut], f"{name}#end": text[cut:]}
