"""Runs a module as a program that ends when the process that started it does.

``python -m tests.runtimes.cluster.end_with_parent <module> <arguments>``: the parent holds the
other end of standard input, and the system closes it however the parent ends, SIGKILL included.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading


def _end_with_parent() -> None:
    # os.read and not sys.stdin: the interpreter's shutdown would wait for the latter's lock.
    while os.read(0, 1024):
        pass
    os._exit(70)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
