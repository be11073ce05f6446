"""Catches signals that ask a program to stop, so that it can end in an orderly way."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import signal
import sys
import threading
import time
from typing import Any, Callable, Iterator, TypeVar

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

    Python drops an exception that a signal's handler raises in a callback of the garbage collector,
    and handlers often run in such callbacks if jax is imported. A KeyboardInterrupt that Python
    drops is raised again a moment later, at the latest at the end of the block.
    """

    def __init__(self, on_first: Callable[[int], None] = lambda number: None):
        self.received: int | None = None
        self._on_first, self._received_at = on_first, 0.0
        self._undo = contextlib.ExitStack()
        self._dropped: int | None = None  # the signal whose KeyboardInterrupt is raised again
        self._again: threading.Timer | None = None

    def __enter__(self: _Self) -> _Self:
        # Python only lets the main thread set handlers; elsewhere nobody can press Ctrl-C.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._undo.enter_context(preserve_handler(number))
                before = signal.signal(number, self._handle)  # None if it is no handler of Python's
                self._undo.callback(signal.signal, number, before or signal.SIG_DFL)
                around = getattr(before, "__self__", None)
                if isinstance(around, Interruption) and around.received is not None:
                    around._cancel_again()
                    self.received, self._received_at = around.received, around._received_at
            self._undo.callback(setattr, sys, "unraisablehook", sys.unraisablehook)
            sys.unraisablehook = functools.partial(self._note_dropped, sys.unraisablehook)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        dropped = self._cancel_again()  # before the handler goes
        self._undo.close()
        if dropped is not None:
            raise KeyboardInterrupt(dropped) from error

    def _handle(self, number: int, unused_frame: Any) -> None:
        now = time.monotonic()
        if self._cancel_again() is not None:
            raise KeyboardInterrupt(number)
        if self.received is None:
            self.received, self._received_at = number, now
            self._on_first(number)
        elif now - self._received_at > _SAME_KEYSTROKE_SECONDS:
            raise KeyboardInterrupt(number)

    def _note_dropped(self, before: Callable[[Any], Any], unraisable: Any) -> None:
        """Lets the main thread get a signal again whose KeyboardInterrupt Python has dropped.

        `unraisable` describes what Python drops; any other exception goes on to the hook `before`.
        """
        if not isinstance(unraisable.exc_value, KeyboardInterrupt) or self.received is None:
            before(unraisable)
            return
        self._dropped = signal_of(unraisable.exc_value)
        main = threading.main_thread().ident
        # After the code that the main thread now runs.
        self._again = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (main, self._dropped))
        self._again.daemon = True
        self._again.start()

    def _cancel_again(self) -> int | None:
        """Ends the wait that `_note_dropped` has begun; returns its signal, or None without one."""
        again, self._again = self._again, None
        if again is None:
            return None
        again.cancel()
        return self._dropped


class Interruption(StopSignal):
    """A context manager that turns SIGINT and SIGTERM into KeyboardInterrupts.

    Some libraries catch every exception and go on, or raise their own, as TensorFlow's
    ``DType.max`` does. So a program calls `check` between the parts of its work: `check` raises the
    KeyboardInterrupt again. A `StopSignal` inside the block has received the signal from its start.
    An Exception that leaves the block after a signal is replaced by the KeyboardInterrupt.
    """

    def __init__(self) -> None:
        super().__init__(_interrupt)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if self.received is not None and isinstance(error, Exception):
            raise KeyboardInterrupt(self.received) from error

    def check(self) -> None:
        """Raises the KeyboardInterrupt if a signal has come since the context began."""
        if self.received is not None:
            self._cancel_again()
            _interrupt(self.received)


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
