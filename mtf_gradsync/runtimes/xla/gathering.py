"""Exchanges values between processes; checks that all processes succeed and agree."""

from __future__ import annotations

import collections
import hashlib
from typing import Any, Callable, Iterator, Sequence, TypeVar

import numpy as np

from mtf_gradsync.runtimes.processes.members import ProcessesError
from mtf_gradsync.runtimes.xla.core_devices import check_jaxlib_for_processes
from mtf_gradsync.runtimes.xla.runner.jax_devices import exchanged
from mtf_gradsync.runtimes.xla.runner.loaded_program import wait_for_last_program


class ExchangeError(ProcessesError):
    """The error of processes that could not exchange values; perhaps a process is lost."""


class OtherProcessError(ProcessesError):
    """The error of a function that failed on another process; that process reports it, too."""


def may_be_from_another_process(error: BaseException | None) -> bool:
    """Returns whether an exception may have its cause on another process, such as its death.

    The result is True if `error`, or an exception that led to `error`, is an error of XLA, an
    `ExchangeError` or an `OtherProcessError`. If `error` is None, the result is False.
    """
    while error is not None:
        if isinstance(error, (ExchangeError, OtherProcessError)):
            return True
        # Perhaps a collective of which another process is lost.
        if type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError"):
            return True
        error = error.__cause__ or error.__context__
    return False


_Result = TypeVar("_Result")

# Bytes of one process's values that are exchanged at a time.
_PIECE_BYTES = 64 << 20
_TEXT_BYTES = 600


def call_on_all_processes(work: Callable[[], _Result]) -> _Result:
    """Calls `work`, and waits for the functions of all processes; returns the result of `work`.

    All processes have to call `call_on_all_processes`, each with its own function. If `work` raises
    an exception on this process, this exception is raised. If a function raises an exception on
    another process only, an `OtherProcessError` is raised here.
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
    """Raises a ProcessesError unless all processes give the same `content`.

    All processes have to call this function. They exchange only checksums of the content. `what` is
    the name of the content in the error's text, in the plural, as in "the programs".
    """
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
    """Raises a ProcessesError, which quotes the values, unless all processes give the same `value`.

    All processes have to call this function. `what` is the name of the value in the error's text,
    and `advice` is the last sentence of this text.
    """
    values = _texts_of_all(value)
    others = [f"{v} on process {i}" for i, v in enumerate(values) if v != values[0]]
    if others:
        raise ProcessesError(
            f"The processes differ: {what} is {values[0]} on process 0 and {', '.join(others)}. "
            f"{advice}"
        )


def whole_texts_of_all(text: str) -> list[str]:
    """Returns the texts of all processes, however long they are, in the processes' order.

    All processes have to call this function. `text` is the text of this process.
    """
    (sizes,) = _exchanged([np.array(len(text.encode()))])
    return _texts_of_all(text, int(max(sizes)))


def _texts_of_all(text: str, most: int = _TEXT_BYTES) -> list[str]:
    """Returns the texts of all processes, in the processes' order.

    All processes have to call this function. `text` is the text of this process. A text of more
    than `most` bytes is cut to that length.
    """
    padded = np.zeros(most, np.uint8)
    data = np.frombuffer(text.encode()[:most], np.uint8)
    padded[: len(data)] = data
    (texts,) = _exchanged([padded])
    return [t.tobytes().rstrip(b"\0").decode("utf-8", "replace") for t in texts]


def _split_for_exchange(values: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Yields `values` in their order, in lists of at most `_PIECE_BYTES` bytes each.

    The caller exchanges one list after another, so that an exchange of many values takes little
    memory. A value of more than `_PIECE_BYTES` bytes is alone in its list. Raises a ProcessesError
    if the values of two processes differ in shapes or dtypes.
    """
    check_same("values to exchange", repr([(v.shape, v.dtype.str) for v in values]).encode())
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
    """Returns all processes' `words`, stacked (how="gather") or added up (how="sum").

    `words` is this process's array of integers. All processes have to call this function, and all
    their arrays must have the same shape and dtype. Raises an `ExchangeError` if the exchange
    fails.
    """
    import jax

    wait_for_last_program()
    try:
        return exchanged(words, tuple(jax.devices()), how)
    except (RuntimeError, ValueError) as error:  # jaxlib 0.4 raises what fails at once as either
        raise ExchangeError(
            f"The processes could not exchange values: {' '.join(str(error).split())}"
        ) from error


def _packed(values: Sequence[np.ndarray]) -> np.ndarray:
    # As bytes: exchanged values pass through a program, which might round other types.
    parts = [np.ascontiguousarray(v).reshape(-1).view(np.uint8) for v in values]
    return np.concatenate(parts)


def _unpacked(packed: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the values of all processes, each as an array ``[processes, ...]``.

    `packed` is an array ``[processes, bytes]``: each row is what the function `_packed` returned on
    one process. `like` are values with the shapes and dtypes that the values of each process have.
    """
    found, begin = [], 0
    for value in like:
        part = np.ascontiguousarray(packed[:, begin : begin + value.nbytes])
        found.append(part.view(value.dtype).reshape(len(packed), *value.shape))
        begin += value.nbytes
    return found


class Cores:
    """The cores of a program, one jax device each; every process has equally many of them.

    All cores may also be on this process. If the cores are on several processes, all processes have
    to call the methods of this class, and give equally many values of the same shapes.

    Attributes:
      devices: the devices of all cores, in the order of the cores' numbers.
      local: the numbers of this process's cores.
      local_devices: the devices of this process's cores.
    """

    def __init__(self, devices: Sequence[Any]):
        self.devices = list(devices)
        self._me = devices[0].client.process_index()
        self._owners = [d.process_index for d in devices]
        self.local = [core for core, owner in enumerate(self._owners) if owner == self._me]
        self.local_devices = [devices[core] for core in self.local]
        if not self.is_alone:
            if devices[0].platform == "cpu":
                check_jaxlib_for_processes()
            self._check_shares()

    @property
    def is_alone(self) -> bool:
        """Whether this process has all cores."""
        return len(self.local) == len(self.devices)

    @property
    def is_first(self) -> bool:
        """Whether this process does the work that one process does for all, such as writing files.

        The process that does this work is process 0, or the process that has all cores.
        """
        return self.is_alone or self._me == 0

    def gather(self, local: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """Gathers arrays of the cores of all processes; returns all of them on every process.

        Each core has an array of each value, such as its slice of a variable. `local` has, for each
        value, the list of the arrays on this process's cores. The result has, for each value, the
        list of the arrays on all cores, in the order of the cores' numbers.
        """
        if self.is_alone:
            return [list(per_core) for per_core in local]
        pieces = _split_for_exchange([np.stack(per_core) for per_core in local])
        # For each value an array [processes, cores, ...].
        stacked = [value for piece in pieces for value in _exchanged(piece)]
        rows: dict[int, int] = collections.defaultdict(int)
        where = []
        for owner in self._owners:
            where.append((owner, rows[owner]))
            rows[owner] += 1
        return [[value[process][row] for process, row in where] for value in stacked]

    def from_first(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns, on every process, the first process's `values`.

        On the other processes, only the shapes and dtypes of `values` are used. All processes have
        to give the same shapes and dtypes.
        """
        if self.is_alone:
            return list(values)
        found = []
        for piece in _split_for_exchange(values):
            packed = _packed(piece)
            words = np.pad(packed, (0, -len(packed) % 4)).view(np.uint32)
            # All other processes add zeros to it.
            sent = _exchange_words(words if self._me == 0 else np.zeros_like(words), "sum")
            found += [v[0] for v in _unpacked(sent.view(np.uint8)[np.newaxis], piece)]
        return found

    def call_on_all_processes(self, work: Callable[[], _Result]) -> _Result:
        """Calls `work`, and waits for the functions of all processes that have these cores.

        Returns what `work` returned on this process. All processes have to call this method. If
        `work` raises an exception on this process, this exception is raised. If a function raises
        an exception on another process only, an `OtherProcessError` is raised here.
        """
        return work() if self.is_alone else call_on_all_processes(work)

    def check_same(self, what: str, content: bytes) -> None:
        """Raises a ProcessesError unless all processes of these cores give the same `content`.

        `what` is the name of the content in the error's text, in the plural, as in "the programs".
        """
        if not self.is_alone:
            check_same(what, content)

    def _check_shares(self) -> None:
        import jax

        count = jax.process_count(self.devices[0].platform)
        shares = collections.Counter(self._owners)
        if len({shares[process] for process in range(count)}) > 1:
            said = ", ".join(f"process {p} has {shares[p]}" for p in range(count))
            raise ProcessesError(
                "All processes must have the same number of the mesh's cores, but of "
                f"{len(self.devices)} cores {said}. Take a mesh whose size is a multiple of "
                f"{count}, and give every "
                f"process {-(-len(self.devices) // count)} devices (cpu_devices of "
                "start_processes, for CPU devices)."
            )
