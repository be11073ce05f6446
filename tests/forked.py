"""Programs that start from a process that has imported TensorFlow already.

Importing it takes longer than most programs of the tests. Each is a process of its own all the
same: forked, by multiprocessing's fork server, from one that has imported TensorFlow and done
nothing else (no session, no device, and nothing of this package).
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import sys
import tempfile
import threading
import weakref
from typing import Any, Sequence

# Seconds. Bounds a hang; far above what a test takes on a machine that is busy with other things.
TIME_LIMIT = 900.0
_FORK_SERVER = multiprocessing.get_context("forkserver")
_FORK_SERVER.set_forkserver_preload(["tensorflow"])


def _end_with_parent() -> None:
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(70)


def _run(command: list[str], cwd: str, environment: dict[str, str], outputs: list[str]) -> None:
    """The life of a forked process."""
    os.setsid()
    # As for the tests themselves. A collection would also copy the pages of all that is imported.
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    for descriptor, path in enumerate(outputs, 1):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    # As the interpreter has them: a SIGINT is a KeyboardInterrupt, also in a background job.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = command
        sys.path.insert(0, os.path.dirname(command[0]))
        runpy.run_path(command[0], run_name="__main__")


class Forked:
    """A program in a process, and a process group, of its own; it ends with this process.

    What it registers with atexit is not called.

    Attributes:
      pid: its process number.
    """

    def __init__(
        self, command: Sequence[Any], cwd: Any = ".", environment: dict[str, str] | None = None
    ):
        """Starts it.

        Args:
          command: what follows the interpreter's name on a command line: "-m" and a module, "-c"
            and code, or a file; and arguments.
          cwd: its working directory.
          environment: its environment; None is this process's.
        """
        # Files and not pipes: nobody has to read for the program to go on.
        self._outputs = [tempfile.NamedTemporaryFile() for _ in range(2)]  # noqa: SIM115
        for file in self._outputs:
            weakref.finalize(self, file.close)
        given = (
            [str(word) for word in command],
            os.path.abspath(cwd),
            dict(os.environ if environment is None else environment),
            [file.name for file in self._outputs],
        )
        self._process = _FORK_SERVER.Process(target=_run, args=given)
        self._process.start()
        self.pid: int = self._process.pid

    def output(self) -> str:
        """What it has written to standard output."""
        return self._text(0)

    def errors(self) -> str:
        """What it has written to standard error."""
        return self._text(1)

    def _text(self, which: int) -> str:
        descriptor = self._outputs[which].fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode("utf-8", "replace")

    def poll(self) -> int | None:
        """What it ended with, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float = TIME_LIMIT) -> int | None:
        """Waits for its end, or some seconds; returns what `poll` does."""
        self._process.join(timeout)
        return self.poll()

    def kill(self) -> None:
        """Ends it and whatever it started, and waits for its end."""
        # One by one: right after its start it has no group of its own yet.
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        self.wait()
