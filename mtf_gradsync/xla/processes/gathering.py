"""Exchanges values of the host between all processes of a job.

All processes have to call each function here, in the same order. Each takes part with one device:
once that has its values, the exchange is over.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, Callable, Iterator, Sequence, TypeVar

import numpy as np

from mtf_gradsync.processes.errors import ProcessesError
from mtf_gradsync.xla.processes.errors import ExchangeError, OtherProcessError
from mtf_gradsync.xla.runner.turns import wait_for_turn

_Result = TypeVar("_Result")

# Bytes of one process's values that are exchanged at a time.
_PIECE_BYTES = 64 << 20
_TEXT_BYTES = 600


def all_gathered(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the values of all processes: for each value an array ``[processes, ...]``."""
    check_same("values to exchange", repr([(v.shape, v.dtype.str) for v in values]).encode())
    return [g for piece in _pieces(values) for g in _exchanged(piece)]


def from_first(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the values of process 0; those of the others have the same shapes and dtypes."""
    check_same("values to exchange", repr([(v.shape, v.dtype.str) for v in values]).encode())
    import jax

    found = []
    for piece in _pieces(values):
        packed = _packed(piece)
        words = np.pad(packed, (0, -len(packed) % 4)).view(np.uint32)
        # All others add zeros to it.
        sent = _exchange_words(words if jax.process_index() == 0 else np.zeros_like(words), "sum")
        found += [v[0] for v in _unpacked(sent.view(np.uint8)[np.newaxis], piece)]
    return found


def together(work: Callable[[], _Result]) -> _Result:
    """Calls a function on every process, and waits until all have done so.

    If it failed here, its own error is raised; if on another process, a ProcessesError.
    """
    try:
        result = work()
    except Exception as error:
        _texts_of_all(f"{type(error).__name__}: {error}")
        raise
    texts = [(i, text) for i, text in enumerate(_texts_of_all("")) if text]
    if texts:
        raise OtherProcessError(f"On process {texts[0][0]}: {texts[0][1]}")
    return result


def check_same(what: str, content: bytes) -> None:
    """Raises a ProcessesError unless all processes have the same content, which `what` names."""
    digest = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
    (digests,) = _exchanged([digest])
    others = [str(i) for i, d in enumerate(digests) if not np.array_equal(d, digests[0])]
    if others:
        raise ProcessesError(
            f"The processes differ: {what} on process {', '.join(others)} are not those on process "
            "0. Every process has to build the same program and to make the same calls with the "
            "same fetches in the same order."
        )


def check_equal(what: str, value: str, advice: str) -> None:
    """Raises a ProcessesError that names the values unless all processes have the same one."""
    values = _texts_of_all(value)
    others = [f"{v} on process {i}" for i, v in enumerate(values) if v != values[0]]
    if others:
        raise ProcessesError(
            f"The processes differ: {what} is {values[0]} on process 0 and {', '.join(others)}. "
            f"{advice}"
        )


def _texts_of_all(text: str) -> list[str]:
    """Returns the texts of all processes."""
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
    return _unpacked(_exchange_words(_packed(values), "gather"), values)


def _exchange_words(words: np.ndarray, how: str) -> np.ndarray:
    """Returns the rows of all processes, one below the other ("gather") or added up ("sum")."""
    import jax

    devices, combined = _exchange_program(how)
    wait_for_turn()
    mine = next(d for d in devices if d.process_index == jax.process_index())
    rows = jax.make_array_from_single_device_arrays(
        (len(devices), *words.shape),
        jax.sharding.NamedSharding(
            jax.sharding.Mesh(np.array(devices), ("process",)),
            jax.sharding.PartitionSpec("process"),
        ),
        [jax.device_put(words[np.newaxis], mine)],
    )
    try:
        return np.asarray(combined(rows).addressable_data(0))
    except (RuntimeError, ValueError) as error:  # jaxlib 0.4 raises what fails at once as either
        raise ExchangeError(
            f"The processes could not exchange values: {' '.join(str(error).split())}"
        ) from error


@functools.lru_cache(maxsize=None)
def _exchange_program(how: str) -> tuple[list[Any], Callable[[Any], Any]]:
    """Returns a device of each process, and a program that sends each one's values to all."""
    import jax

    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    devices = [first[process] for process in sorted(first)]
    everywhere = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(devices), ("process",)), jax.sharding.PartitionSpec()
    )
    combine = {"gather": lambda rows: rows, "sum": lambda rows: rows.sum(0, rows.dtype)}[how]
    return devices, jax.jit(combine, out_shardings=everywhere)


def _packed(values: Sequence[np.ndarray]) -> np.ndarray:
    # As bytes, because what is exchanged passes through a program, which rounds no byte.
    parts = [np.ascontiguousarray(v).reshape(-1).view(np.uint8) for v in values]
    return np.concatenate(parts)


def _unpacked(packed: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the inverse of `_packed` for ``[processes, bytes]``."""
    found, begin = [], 0
    for value in like:
        part = np.ascontiguousarray(packed[:, begin : begin + value.nbytes])
        found.append(part.view(value.dtype).reshape(len(packed), *value.shape))
        begin += value.nbytes
    return found
