"""Gives the watchdog time to report before SIGABRT ends the process.

When the coordinator dies, jax's client notices as fast as the watchdog and ends its process by
SIGABRT, with a message that does not say who died. Errors that gloo throws in its own threads end
the process likewise. Python's faulthandler then writes into a pipe, for the watchdog; a handler
below it sleeps (``abort`` ends the process when its handler returns), which gives the watchdog's
thread time to speak.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from typing import Any, Callable

from mtf_gradsync.processes.watchdog import Alarm

_FRAMES = 5


def alarm_before_abort() -> tuple[Alarm | None, Callable[[], None]]:
    """Makes SIGABRT alert a watchdog, and wait for some seconds before it ends this process.

    Returns the watchdog's alarm, and a function that restores the previous handlers. The alarm is
    None if faulthandler is enabled already, for another purpose, or this is no POSIX system.
    """
    try:
        library = ctypes.CDLL(None)
        set_handler, sleep = library.signal, library.sleep
    except (OSError, AttributeError):  # no POSIX
        return None, lambda: None
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    # The handler's argument is the signal's number: the C function sleeps 6 seconds. Unlike
    # anything in Python it may be called whatever the thread was doing.
    is_taken = faulthandler.is_enabled()
    before: Any = set_handler(signal.SIGABRT, ctypes.cast(sleep, ctypes.c_void_p))
    if is_taken:
        return None, lambda: set_handler(signal.SIGABRT, before) and None
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    # Its handler calls the one that was there before it: the one that sleeps.
    faulthandler.enable(writing)

    def undo() -> None:
        faulthandler.disable()
        set_handler(signal.SIGABRT, before)
        os.close(writing)

    return Alarm(reading, _in_words), undo


def _in_words(traceback: str) -> str:
    """Returns a crash in words, from faulthandler's traceback."""
    import jax
    import jaxlib

    # The newest thread is listed first, and the main thread, which makes the steps, last.
    main = traceback.rpartition("most recent call first")[2]
    own = [line.strip() for line in main.splitlines() if line.startswith("  File ")][:_FRAMES]
    where = f" The main thread stood at {'; '.join(own)}." if own else ""
    return (
        f"SIGABRT inside jax {jax.__version__}, jaxlib {jaxlib.__version__} or a library of "
        "theirs, such as gloo, which has written just before what is wrong; the collective in "
        f"which it happened is not known.{where}"
    )
