"""Gives the watchdog time to speak before jax ends the process.

Where the coordinator dies, jax's client notices as fast as the watchdog and ends its process by
SIGABRT, with a message that does not say who died. A handler of SIGABRT that sleeps (``abort`` ends
the process when its handler returns) leaves the last word to the watchdog's thread.
"""

from __future__ import annotations

import ctypes
import signal
from typing import Any, Callable


def pause_before_abort() -> Callable[[], None]:
    """Makes SIGABRT wait for some seconds before it ends this process.

    Returns:
      A function that puts back what was before.
    """
    try:
        library = ctypes.CDLL(None)
        set_handler, sleep = library.signal, library.sleep
    except (OSError, AttributeError):  # no POSIX
        return lambda: None
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    # The handler's argument is the signal's number: the C function sleeps 6 seconds. Unlike
    # anything in Python it may be called whatever the thread was doing.
    before: Any = set_handler(signal.SIGABRT, ctypes.cast(sleep, ctypes.c_void_p))
    return lambda: set_handler(signal.SIGABRT, before) and None
