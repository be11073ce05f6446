"""Processes of `benchmarks.cluster` that are forked, so that none has to import TensorFlow."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import traceback
import types
from typing import Any, Sequence

from benchmarks import cluster


def fork_servers() -> None:
    """Makes `LocalCluster` fork this process, which has TensorFlow and has not used it yet."""
    cluster.subprocess = types.SimpleNamespace(Popen=_Forked, PIPE=subprocess.PIPE)


class _Forked:
    """What `LocalCluster` uses of ``subprocess.Popen``."""

    def __init__(self, command: Sequence[str], env: dict[str, str], stderr: Any, **unused: Any):
        # What this process reads from, or writes to, and what the other one does.
        (answers, said), (asked, asks) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _live(command, env, (asked, said, stderr.fileno()), (answers, asks))
        os.close(asked)
        os.close(said)
        self.stdin, self.stdout = open(asks, "w"), open(answers)  # noqa: SIM115
        self._lock, self._code = threading.Lock(), None

    def wait(self) -> int:
        """Waits for its end; returns what it ended with."""
        with self._lock:
            if self._code is None:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self) -> None:
        """Ends it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _live(
    command: Sequence[str], env: dict[str, str], files: Sequence[int], others: Sequence[int]
) -> None:
    """The life of a forked process."""
    try:
        os.setsid()
        for descriptor in others:
            os.close(descriptor)
        for number, descriptor in enumerate(files):
            os.dup2(descriptor, number)
        os.environ.update(env)
        # After the interpreter, -m and the module.
        cluster.main(*command[3:])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
