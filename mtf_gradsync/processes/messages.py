"""Short messages between processes over TCP: a JSON object on each line."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

_LONGEST = 1 << 16


class ConnectionBroken(Exception):
    """The other side is gone, or says what no process of ours says."""


class Connection:
    """One end of a connection. Nothing here waits."""

    def __init__(self, sock: socket.socket):
        """Takes over a connected socket."""
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._unread = b""
        self._unsent = b""

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Sends a message, or keeps it for the next time where the other side does not read.

        Raises:
          ConnectionBroken: when nobody is there.
        """
        self._unsent = (self._unsent + json.dumps(message).encode() + b"\n")[-_LONGEST:]
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ConnectionBroken(str(error)) from error

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come.

        Raises:
          ConnectionBroken: when nobody is there, and all messages have been returned.
        """
        broken = False
        try:
            while len(self._unread) < _LONGEST:
                data = self._socket.recv(4096)
                if not data:
                    broken = True
                    break
                self._unread += data
        except BlockingIOError:
            pass
        except OSError:
            broken = True
        *lines, self._unread = self._unread.split(b"\n")
        if (broken and not lines) or len(self._unread) >= _LONGEST:
            raise ConnectionBroken("its connection broke")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError as error:
            raise ConnectionBroken(f"no message: {error}") from error
        if not all(isinstance(message, dict) for message in messages):
            raise ConnectionBroken("no message")
        return messages

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()
