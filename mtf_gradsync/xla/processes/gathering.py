"""Exchanges values of the host between all processes of a job.

All processes have to call each function here, in the same order.
"""

from __future__ import annotations

import hashlib
from typing import Callable, Iterator, Sequence, TypeVar

import numpy as np

from mtf_gradsync.processes.errors import ProcessesError

_Result = TypeVar("_Result")

# Of one process's values that are exchanged at a time.
_PIECE_BYTES = 64 << 20
_TEXT_BYTES = 600


def all_gathered(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The values of all processes.

    Args:
      values: this process's; the others' have the same shapes and dtypes.

    Returns:
      For each value: array ``[processes, ...]``.

    Raises:
      ProcessesError: when the others' have not.
    """
    check_same("values to exchange", repr([(v.shape, v.dtype.str) for v in values]).encode())
    return [g for piece in _pieces(values) for g in _exchanged(piece)]


def from_first(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The values of process 0.

    Args:
      values: this process's; the others' have the same shapes and dtypes.

    Returns:
      Process 0's.

    Raises:
      ProcessesError: when the others' have not.
    """
    check_same("values to exchange", repr([(v.shape, v.dtype.str) for v in values]).encode())
    from jax.experimental import multihost_utils

    found = []
    for piece in _pieces(values):
        # jax adds zeros to it, and makes 32-bit numbers of shorter ones for that.
        packed = _packed(piece)
        words = np.pad(packed, (0, -len(packed) % 4)).view(np.uint32)
        sent = np.asarray(multihost_utils.broadcast_one_to_all(words)).view(np.uint8)
        found += [v[0] for v in _unpacked(sent[np.newaxis], piece)]
    return found


def together(work: Callable[[], _Result]) -> _Result:
    """Does something on every process, and waits until all have done it.

    Args:
      work: what to do.

    Returns:
      What it returned here.

    Raises:
      ProcessesError: when it failed on another process. Here it raises what it raises.
    """
    try:
        result = work()
    except Exception as error:
        _said(f"{type(error).__name__}: {error}")
        raise
    said = [(i, text) for i, text in enumerate(_said("")) if text]
    if said:
        raise ProcessesError(f"On process {said[0][0]}: {said[0][1]}")
    return result


def check_same(what: str, content: bytes) -> None:
    """Checks that all processes have the same.

    Args:
      what: for the error.
      content: this process's.

    Raises:
      ProcessesError: names the processes whose content is another than process 0's.
    """
    digest = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
    (digests,) = _exchanged([digest])
    others = [str(i) for i, d in enumerate(digests) if not np.array_equal(d, digests[0])]
    if others:
        raise ProcessesError(
            f"The processes do not do the same: {what} are other ones on process "
            f"{', '.join(others)} than on process 0. Every process has to build the same program "
            "and to make the same calls with the same fetches in the same order."
        )


def _said(text: str) -> list[str]:
    """The texts of all processes."""
    padded = np.zeros(_TEXT_BYTES, np.uint8)
    data = np.frombuffer(text.encode()[:_TEXT_BYTES], np.uint8)
    padded[: len(data)] = data
    (texts,) = _exchanged([padded])
    return [t.tobytes().rstrip(b"\0").decode("utf-8", "replace") for t in texts]


def _pieces(values: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    piece: list[np.ndarray] = []
    size = 0
    for value in values:
        if piece and size + value.nbytes > _PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(value)
        size += value.nbytes
    if piece:
        yield piece


def _exchanged(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    from jax.experimental import multihost_utils

    return _unpacked(np.asarray(multihost_utils.process_allgather(_packed(values))), values)


def _packed(values: Sequence[np.ndarray]) -> np.ndarray:
    # As bytes, because what is exchanged passes through a program, which rounds no byte.
    parts = [np.ascontiguousarray(v).reshape(-1).view(np.uint8) for v in values]
    return np.concatenate(parts)


def _unpacked(packed: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The inverse of `_packed` for ``[processes, bytes]``."""
    found, begin = [], 0
    for value in like:
        part = np.ascontiguousarray(packed[:, begin : begin + value.nbytes])
        found.append(part.view(value.dtype).reshape(len(packed), *value.shape))
        begin += value.nbytes
    return found
