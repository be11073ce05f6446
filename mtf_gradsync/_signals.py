"""Notes signals that ask a program to stop, so that it can finish what it is doing."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any, Callable

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Terminals and process managers deliver one Ctrl-C more than once.
_SAME_KEYSTROKE_SECONDS = 1.0


class StopSignal:
    """Turns SIGINT and SIGTERM into a request to stop, while it is entered.

    `received` is the number of the first signal, None before, and on_first is called with it. A
    second signal, more than a moment later, is a KeyboardInterrupt: a user who presses Ctrl-C twice
    does not want to wait.
    """

    def __init__(self, on_first: Callable[[int], None] = lambda number: None):
        self.received: int | None = None
        self._on_first = on_first
        self._received_at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        # Python only lets the main thread set handlers; elsewhere nobody can press Ctrl-C.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *unused_exception: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, unused_frame: Any) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = number, now
            self._on_first(number)
        elif now - self._received_at > _SAME_KEYSTROKE_SECONDS:
            raise KeyboardInterrupt
