"""Sends the watchdog's messages for its parent process while the parent's threads cannot run.

The proxy runs as a script in a process of its own. The watchdog's thread needs the interpreter lock
of the parent's Python to send a heartbeat. But TensorFlow's bridge to XLA keeps this lock while it
lowers a program, which takes seconds or minutes.

The command line is ``proxy.py PID SECONDS SOCKET...``: the process id of the parent process, the
  seconds between two heartbeats, and the file descriptors of the sockets. Standard input is a pipe,
  and the proxy ends when the parent process closes it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time

# What `messages.Connection.send(beat=True)` sends.
BEAT = b'{"beat": true}\n'


def is_stopped(pid: int) -> bool:
    """Returns whether the process `pid` is stopped by a signal; False if the system cannot tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The process's name, in parentheses, may hold any characters.
            return file.read().rpartition(b") ")[2][:1] in (b"T", b"t")
    except OSError:
        return False


def main(pid: int, seconds: float, descriptors: list[int]) -> None:
    """Sends a heartbeat every `seconds` on each of the sockets, until the parent closes the pipe.

    `pid` is the process id of the parent process, and `descriptors` are the file descriptors of the
    sockets. While the parent process is stopped by a signal, no heartbeat is sent. The parent's end
    ends the function, too, because another child of the parent may hold the pipe open.
    """
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    # The connections have to break soon after the parent's end.
    while os.getppid() == pid:
        if not is_stopped(pid):
            for one in sockets:
                with contextlib.suppress(OSError):
                    one.send(BEAT)
        end = time.monotonic() + seconds
        while time.monotonic() < end and os.getppid() == pid:
            if select.select([sys.stdin], [], [], 0.1)[0]:
                return


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), [int(x) for x in sys.argv[3:]])
