"""A vocabulary of bytes, which needs no data."""

from __future__ import annotations

from typing import Iterable

import gin
import numpy as np

PAD_ID = 0
EOS_ID = 1


@gin.configurable(module="mtf_gradsync.train")
class ByteVocabulary:
    """A vocabulary of UTF-8 bytes as tokens; a few ids before them have meanings of their own.

    Id 0 is padding, for which Mesh-TensorFlow counts no loss. Id 1 ends a document, id 2 is
    reserved, and byte ``b`` has the id ``b + 3``. ByT5 numbers bytes in the same way. Any object
    with ``vocab_size``, ``encode`` and ``decode`` can be used in place of a ByteVocabulary.
    """

    NUM_SPECIAL_IDS = 3

    def __init__(self) -> None:
        # Without a constructor, gin would accept bindings of any arguments.
        super().__init__()

    @property
    def vocab_size(self) -> int:
        """Number of ids, the special ones included."""
        return 256 + self.NUM_SPECIAL_IDS

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text's bytes."""
        ids = np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)
        return (ids + self.NUM_SPECIAL_IDS).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids; special ids are skipped, broken UTF-8 is marked."""
        return self._bytes(ids).decode("utf-8", errors="replace")

    def num_bytes(self, ids: Iterable[int]) -> int:
        """Returns how many bytes of text the ids stand for."""
        return len(self._bytes(ids))

    def _bytes(self, ids: Iterable[int]) -> bytes:
        low = self.NUM_SPECIAL_IDS
        return bytes(i - low for i in map(int, ids) if low <= i < low + 256)
