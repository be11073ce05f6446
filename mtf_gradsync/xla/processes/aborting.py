"""Gives the watchdog time to report before a fatal signal ends the process.

When the coordinator dies, jax's client notices as fast as the watchdog and ends its process by
SIGABRT, with a message that does not say who died. Errors that gloo throws in its own threads end
the process likewise, and threads that lose what they work on may end it by SIGSEGV. Python's
faulthandler then writes into a pipe, for the watchdog; a handler below it sleeps (the process ends
when the handler returns), which gives the watchdog's thread time to speak.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from typing import Any, Callable

from mtf_gradsync.processes.watchdog import Alarm

_FRAMES = 5
# The signals that faulthandler handles, by what it writes first.
_FATAL = {
    "Aborted": "SIGABRT",
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}


def alarm_before_abort() -> tuple[Alarm | None, Callable[[], None]]:
    """Makes fatal signals alert a watchdog, and wait for some seconds before they end this process.

    Returns the watchdog's alarm, and a function that restores the previous handlers. The alarm is
    None if faulthandler is enabled already, for another purpose, or this is no POSIX system.
    """
    try:
        library = ctypes.CDLL(None)
        sleep, set_handler = library.sleep, library.signal
    except (OSError, AttributeError):  # no POSIX
        return None, lambda: None
    # An instruction that faulted runs again when the handler returns, so its handler has to work
    # once. Where C's library has no such handlers, only `abort` waits.
    set_once = getattr(library, "sysv_signal", None)
    for setter in (set_handler, set_once):
        if setter is not None:
            setter.restype, setter.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    is_taken = faulthandler.is_enabled()
    # The handler's argument is the signal's number: the C function sleeps as many seconds, 4 to 11.
    # Unlike anything in Python it may be called whatever the thread was doing.
    handler = ctypes.cast(sleep, ctypes.c_void_p)
    before: dict[int, Any] = {}
    for name in _FATAL.values():
        number = getattr(signal, name)
        if number == signal.SIGABRT:
            before[number] = set_handler(number, handler)
        elif set_once is not None and not is_taken:  # faulthandler keeps what it found
            before[number] = set_once(number, handler)

    def restore() -> None:
        for number, handler_before in before.items():
            set_handler(number, handler_before)

    if is_taken:
        return None, restore
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    # Its handlers call those that were there before them: the ones that sleep.
    faulthandler.enable(writing)

    def undo() -> None:
        faulthandler.disable()
        restore()
        os.close(writing)

    return Alarm(reading, _in_words), undo


def _in_words(traceback: str) -> str:
    """Returns a crash in words, from faulthandler's traceback."""
    import jax
    import jaxlib

    first = traceback.partition("\n")[0].rpartition(": ")[2]
    name = _FATAL.get(first.strip(), "a fatal signal")
    # The newest thread is listed first, and the main thread, which makes the steps, last.
    main = traceback.rpartition("most recent call first")[2]
    own = [line.strip() for line in main.splitlines() if line.startswith("  File ")][:_FRAMES]
    where = f" The main thread stood at {'; '.join(own)}." if own else ""
    wrote = ", which has written just before what is wrong" if name == "SIGABRT" else ""
    return (
        f"{name} inside jax {jax.__version__}, jaxlib {jaxlib.__version__} or a library of "
        f"theirs, such as gloo{wrote}; the collective in which it happened is not known.{where}"
    )
