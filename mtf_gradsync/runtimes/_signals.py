"""Catches signals that ask a program to stop, so that it can end in an orderly way."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
import time
from typing import Any, Callable, Iterator, Sequence, TypeVar

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Terminals and process managers deliver one Ctrl-C more than once.
_SAME_KEYSTROKE_SECONDS = 1.0
# After which a dropped KeyboardInterrupt is raised again; a callback of the collector is shorter.
_AGAIN_SECONDS = 0.02
# Bytes; the struct of Linux has 152.
_MOST_OF_SIGACTION = 1024
_Self = TypeVar("_Self", bound="StopSignal")


class StopSignal:
    """A context manager that turns SIGINT and SIGTERM into a request to stop.

    `received` is the number of the first signal, or None if no signal has come. The first signal
    calls `on_first` with its number. A second signal, unless it comes almost at the same time as
    the first, raises a KeyboardInterrupt: a user who presses Ctrl-C twice does not want to wait.
    A signal that an `Interruption` around this block has received, and whose KeyboardInterrupt was
    lost, counts as the first signal; `on_first` is not called for it.
    """

    def __init__(
        self,
        on_first: Callable[[int], None] = lambda number: None,
        numbers: Sequence[int] = _SIGNALS,
    ):
        self.received: int | None = None
        self._on_first, self._numbers = on_first, numbers
        self._received_at = 0.0
        self._undo = contextlib.ExitStack()

    def __enter__(self: _Self) -> _Self:
        # Python only lets the main thread set handlers; elsewhere nobody can press Ctrl-C.
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                self._undo.enter_context(preserve_handler(number))
                before = signal.signal(number, self._handle)  # None if it is no handler of Python's
                self._undo.callback(signal.signal, number, before or signal.SIG_DFL)
                around = getattr(before, "__self__", None)
                if isinstance(around, Interruption) and around.received is not None:
                    around.cancel_again()
                    self.received, self._received_at = around.received, around._received_at
        return self

    def __exit__(self, *unused_exception: Any) -> None:
        self._undo.close()

    def _handle(self, number: int, unused_frame: Any) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = number, now
            self._on_first(number)
        elif now - self._received_at > _SAME_KEYSTROKE_SECONDS:
            raise KeyboardInterrupt(number)


class Interruption(StopSignal):
    """A context manager that turns signals, by default SIGINT and SIGTERM, into KeyboardInterrupts.

    Python drops an exception that a signal's handler raises in a callback of the garbage collector,
    and handlers often run in such callbacks if jax is imported. A KeyboardInterrupt that Python
    drops is raised again a moment later. Other libraries catch every exception and go on, or raise
    their own, as TensorFlow's ``DType.max`` does. So a program calls `check` between the parts of
    its work: `check` raises the KeyboardInterrupt again. A `StopSignal` inside the block has
    received the signal from its start. An Exception that leaves the block after a signal is
    replaced by the KeyboardInterrupt.
    """

    def __init__(self, numbers: Sequence[int] = _SIGNALS) -> None:
        super().__init__(_interrupt, numbers)
        self._again: threading.Timer | None = None

    def __enter__(self) -> Interruption:
        super().__enter__()
        if threading.current_thread() is threading.main_thread():
            before = sys.unraisablehook

            def note_dropped(unraisable: Any) -> None:
                if isinstance(unraisable.exc_value, KeyboardInterrupt) and self.received:
                    self._raise_soon(self.received)
                else:
                    before(unraisable)

            self._undo.callback(setattr, sys, "unraisablehook", before)
            sys.unraisablehook = note_dropped
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        was_dropped = self.cancel_again()  # before the handler goes
        super().__exit__(kind, error, trace)
        if self.received is not None and (isinstance(error, Exception) or was_dropped):
            raise KeyboardInterrupt(self.received) from error

    def check(self) -> None:
        """Raises the KeyboardInterrupt if a signal has come since the context began."""
        if self.received is not None:
            self.cancel_again()
            _interrupt(self.received)

    def _raise_soon(self, number: int) -> None:
        """Lets the main thread get the signal `number` again, after the code that it now runs."""
        main = threading.main_thread().ident
        self._again = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (main, number))
        self._again.daemon = True
        self._again.start()

    def cancel_again(self) -> bool:
        """Ends the wait that `_raise_soon` has begun; returns whether there was one."""
        again, self._again = self._again, None
        if again is not None:
            again.cancel()
        return again is not None

    def _handle(self, number: int, frame: Any) -> None:
        if self.cancel_again():
            raise KeyboardInterrupt(self.received)
        super()._handle(number, frame)


def signal_of(error: KeyboardInterrupt) -> int:
    """Returns the number of the signal that caused `error`, a KeyboardInterrupt.

    `StopSignal` and `Interruption` put this number into the exception. If the exception has no
    number, the result is SIGINT.
    """
    return next((x for x in error.args if isinstance(x, int)), signal.SIGINT)


@contextlib.contextmanager
def preserve_handler(number: int) -> Iterator[None]:
    """Restores a signal's handler at the end of the block, even a handler that C code had set.

    `number` is the signal's number. Python itself can restore only handlers that Python code has
    set, but faulthandler and some libraries set their handlers in C.
    """
    action = ctypes.create_string_buffer(_MOST_OF_SIGACTION)
    try:
        sigaction = ctypes.CDLL(None).sigaction
    except (AttributeError, OSError, TypeError):  # no POSIX
        yield
        return
    sigaction(number, None, action)
    try:
        yield
    finally:
        sigaction(number, action, None)


def _interrupt(number: int) -> None:
    raise KeyboardInterrupt(number)
