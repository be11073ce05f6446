"""Programs forked from a process that has imported everything, so that each starts at once."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Callable

_PR_SET_PDEATHSIG = 1


class Child:
    """A forked program; it ends with this process.

    Attributes:
      pid: its process number.
      status: exit code, or minus the signal that ended it; None while it runs.
    """

    def __init__(self, program: Callable[[], int], directory: Path):
        """Starts it.

        Args:
          program: returns the exit code.
          directory: for what it prints.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._files = directory / "out", directory / "err"
        for file in self._files:
            file.write_bytes(b"")  # before the fork: they can be read at once
        self.status: int | None = None
        self._ended_at = 0.0
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            _live(program, parent, self._files)

    def poll(self) -> int | None:
        """Looks whether it has ended; returns the status."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def wait(self, seconds: float) -> int | None:
        """Waits for its end; None where it does not come in time."""
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        return self.status

    def send(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it."""
        self.send(signal.SIGKILL)
        self.wait(60)

    def output(self) -> str:
        """What it has written to standard output."""
        return self._files[0].read_text(encoding="utf-8", errors="replace")

    def errors(self) -> str:
        """What it has written to standard error."""
        return self._files[1].read_text(encoding="utf-8", errors="replace")


def _live(
    program: Callable[[], int],
    parent: int,
    files: tuple[Path, Path],
) -> None:
    """The life of a forked program."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        # A pipe in place of a file would fill up; a limit on the size of files would stop a file.
        for descriptor, file in enumerate(files, 1):
            opened = os.open(file, os.O_WRONLY | os.O_APPEND)
            os.dup2(opened, descriptor)
            os.close(opened)
        sys.stdout.reconfigure(line_buffering=True)
        # As any program has them, whatever the process that forked does about them.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not the handlers of the process that forked.
        os._exit(code)
