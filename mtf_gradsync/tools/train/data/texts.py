"""Texts to train on: where they come from, and which part of them is held out.

The module `texts` does not import TensorFlow, so that ``mtf-gradsync init`` answers at once.
"""

from __future__ import annotations

import codecs
import hashlib
import logging
import re
import zlib
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence, Tuple

from mtf_gradsync.extension import counted
from mtf_gradsync.runtimes._common import ConfigError

_logger = logging.getLogger(__name__)

# Shorter paragraphs ("Note:", a lone heading) recur everywhere and do not identify their text.
_MIN_SHARED_PARAGRAPH = 40


def read_python_topics() -> dict[str, bytes]:
    """Returns the language reference that Python's ``help()`` shows, by topic, as UTF-8.

    The language reference comes with CPython as ``pydoc_data.topics``. It is about half a megabyte
    of English and code. Its text changes a little with every Python version, and so do losses that
    are measured on the text.

    Raises:
      ConfigError: this Python was installed without ``pydoc_data``.
    """
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise ConfigError(
            "This Python has no pydoc_data (some distributions strip it), the text that "
            "python_topics trains on; use another Python, or bind "
            "train.run.train_dataset_fn = @text_files"
        ) from error
    return {str(name): str(text).encode("utf-8") for name, text in topics.topics.items()}


def read_files(files: Sequence[str], setting: str = "text_files.files") -> dict[str, bytes]:
    """Reads UTF-8 text files; returns their texts by name, with the line ends of Unix.

    Raises ConfigError if a file cannot be read as UTF-8 or is empty. `setting` is the name of the
    setting or flag that names the `files`; the error's text begins with it.
    """
    if isinstance(files, str) or not files:
        raise ConfigError(f"{setting} must be a list of file names, got {files!r}")
    documents = {}
    for name in files:
        try:
            content = Path(name).read_bytes()
            check = codecs.getincrementaldecoder("utf-8")()
            for begin in range(0, len(content), _PIECE):
                check.decode(content[begin : begin + _PIECE])
            check.decode(b"", final=True)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{setting}: cannot read {name!r} as UTF-8: {error}") from error
        if b"\r" in content:
            content = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if not content or content.isspace():
            raise ConfigError(f"{setting}: {name!r} is empty")
        documents[name] = content
    return documents


# Bytes of a text that are decoded at once: as text they may take four times as many.
_PIECE = 1 << 20


def pieces_of(text: bytes, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yields a UTF-8 text in pieces of at most about a megabyte, cut behind lines or words.

    `begin` and `end` are positions of bytes. If they are given, only the part of the text between
    them is cut into pieces.
    """
    end = len(text) if end is None else end
    while begin < end:
        cut = min(begin + _PIECE, end)
        if cut < end:
            line, word = (text.rfind(mark, begin, cut) + 1 for mark in (b"\n", b" "))
            cut = line or word or _beginning_of_character(text, cut)
        yield bytes(text[begin:cut])
        begin = cut


def _beginning_of_character(text: bytes, at: int) -> int:
    while at < len(text) and text[at] & 0xC0 == 0x80:
        at += 1
    return at


def check_length(documents: Mapping[str, bytes], held_out_every: int, sequence_length: int) -> None:
    """Raises a ConfigError unless each split of the documents has enough for one sequence.

    `sequence_length` is the number of tokens in a sequence. Each byte of the documents counts as a
    token. About one document in `held_out_every` is held out.
    """
    for split in ("train", "validation"):
        texts = split_documents(documents, split, held_out_every)
        tokens = sum(len(text) + 1 for text in texts)  # 1: the end of a document
        if tokens <= sequence_length:
            raise ConfigError(too_short_error(split, tokens, sequence_length, documents))


def too_short_error(
    split: str, tokens: int, sequence_length: int, documents: Mapping[str, bytes] | None = None
) -> str:
    """Returns the error text for a split with less than one sequence of tokens.

    `split` is "train" or "validation", `tokens` is the number of tokens in the split, and
    `documents` are the texts that were divided into splits.
    """
    of = f" of {_named(documents)}" if documents else ""
    return (
        f"The {split} split{of} has {tokens} tokens, less than one window of "
        f"train.run.sequence_length = {sequence_length}. {_MORE}, or shorter sequences"
    )


_MORE = "Give more text (some thousand bytes at least)"


def _named(documents: Mapping[str, bytes]) -> str:
    if not documents:
        return "no text"
    return f"{counted(list(documents), 'text')} ({sum(map(len, documents.values())):,} bytes)"


def split_documents(documents: Mapping[str, bytes], split: str, held_out_every: int) -> list[bytes]:
    """Returns the documents of the split "train" or "validation", in the order of their names.

    A document's name alone decides whether the document is held out; about one document in
    `held_out_every` is. If documents are few, or of unequal lengths, the held-out documents may be
    less than half or more than twice ``1 / held_out_every`` of the text. In this case the last part
    of each document is held out instead; the part begins with a paragraph or a line. Paragraphs of
    held-out parts are removed from the training text, as documents quote each other. The lengths of
    both splits are logged. Documents are UTF-8.
    """
    if split not in ("train", "validation"):
        raise ConfigError(f'dataset_split must be "train" or "validation", got {split!r}')
    if held_out_every < 2:
        raise ConfigError(f"held_out_every must be at least 2, got {held_out_every!r}")
    given, held_out = _divide(documents, held_out_every)
    seen = {_paragraph_key(*one) for part in held_out for one in _paragraphs(*part)} - {b""}
    train: list[Any] = []  # of bytes, or of what can be used as such
    removed = 0
    for part in given:
        kept = bytearray()
        first = True
        for text, begin, end in _paragraphs(*part):
            if seen and _paragraph_key(text, begin, end) in seen:
                removed += end - begin
            elif split == "train":
                kept += b"" if first else b"\n\n"
                # Piece by piece: a paragraph may be the whole text.
                for piece in pieces_of(text, begin, end):
                    kept += piece
                first = False
        train.append(kept)
    left = sum(end - begin for _, begin, end in given) - removed
    held = sum(end - begin for _, begin, end in held_out)
    if removed and left < held:
        raise ConfigError(
            f"{removed:,} of the {left + removed:,} bytes to train on are paragraphs that the "
            "held-out part has, too: the text repeats itself. Take the repetitions out, or give "
            "train.run.eval_dataset_fn a text of its own"
        )
    texts = train if split == "train" else [text[begin:end] for text, begin, end in held_out]
    if all(not text or text.isspace() for text in texts):
        raise ConfigError(
            f"The {split} split is empty: {_named(documents)} with held_out_every="
            f"{held_out_every} leaves nothing for it. {_MORE}"
        )
    also = f"; {removed:,} in both are not trained on" if removed else ""
    _logger.info(
        "The text has %s bytes to train on and %s held out (%.1f %%)%s",
        f"{left:,}", f"{held:,}", 100 * held / (left + held), also,
    )  # fmt: skip
    return texts


# A text, and where a part of it begins and ends: parts are copied as late as can be.
_Part = Tuple[bytes, int, int]


def _divide(documents: Mapping[str, bytes], held_out_every: int) -> tuple[list[_Part], list[_Part]]:
    """Divides documents into parts to train on and parts that are held out, and returns both.

    A part is a tuple (text, begin, end): a document, and the positions of bytes in it at which the
    part begins and ends. About one document in `held_out_every` is held out, or the last part of
    each document (see `split_documents`).
    """
    names = sorted(documents)
    chosen = {name for name in names if zlib.crc32(name.encode()) % held_out_every == 0}
    share, total = 1 / held_out_every, sum(map(len, documents.values()))
    length = sum(len(documents[name]) for name in chosen)
    whole = {name: (documents[name], 0, len(documents[name])) for name in names}
    if total * share / 2 <= length <= total * min(2 * share, (1 + share) / 2):
        train = [whole[name] for name in names if name not in chosen]
        return train, [whole[name] for name in names if name in chosen]
    cuts = {name: _held_out_begin(documents[name], held_out_every) for name in names}
    first = [(text, 0, cuts[name]) for name, (text, _, _) in whole.items()]
    return first, [(text, cuts[name], end) for name, (text, _, end) in whole.items()]


def _held_out_begin(text: bytes, held_out_every: int) -> int:
    """Returns the position of the byte at which the held-out part of a text begins.

    The held-out part is the end of the text. It is about ``1 / held_out_every`` as long as the
    text; its length may differ from this by half, so that it begins with a paragraph, or at least
    with a line.
    """
    length = len(text) // held_out_every
    target = len(text) - length
    earliest, latest = target - length // 2, target + length // 2
    for end in (_PARAGRAPH_END, _LINE_END):
        ends = [match.start() for match in end.finditer(text, earliest, latest)]
        if ends:
            return max((at for at in ends if at <= target), default=ends[0])
    return _beginning_of_character(text, target)


_PARAGRAPH_END, _LINE_END = re.compile(rb"\n[ \t]*\n"), re.compile(rb"\n")


def _paragraphs(text: bytes, begin: int, end: int) -> Iterator[_Part]:
    for match in _PARAGRAPH_END.finditer(text, begin, end):
        yield text, begin, match.start()
        begin = match.end()
    yield text, begin, end


def _paragraph_key(text: bytes, begin: int, end: int) -> bytes:
    """Returns a hash of the paragraph from `begin` to `end` in a text.

    Paragraphs that differ only in white space have the same hash. The result is b"" for a paragraph
    that is so short that many texts may have it.
    """
    digest, length = hashlib.blake2b(digest_size=16), 0
    for piece in pieces_of(text, begin, end):
        words = " ".join(piece.decode("utf-8").split())
        if words:
            words = f" {words}" if length else words
            digest.update(words.encode("utf-8"))
            length += len(words)
    return digest.digest() if length >= _MIN_SHARED_PARAGRAPH else b""
