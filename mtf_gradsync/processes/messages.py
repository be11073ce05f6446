"""Short messages between processes over TCP: a JSON object on each line."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

#: Characters of a text in a message; of a longer one the beginning is sent.
LONGEST_TEXT = 1 << 12
#: Bytes of a message, and of messages that wait for a side that does not read.
LONGEST = 1 << 20


class ConnectionBroken(Exception):
    """The other side has gone, or has sent what no process of this package sends."""


class Connection:
    """One end of a connection, over a connected socket. No method waits."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._unread = b""
        self._unsent = b""

    def fileno(self) -> int:
        """Returns the socket's file descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Sends a message of JSON values, or keeps it while the other side does not read.

        Texts are cut after `LONGEST_TEXT` characters. A message of more than `LONGEST` bytes is a
        ValueError.

        Raises:
          ConnectionBroken: the other side has gone, or more than `LONGEST` bytes would wait for it.
        """
        line = json.dumps({name: _cut(value) for name, value in message.items()}).encode() + b"\n"
        if len(line) > LONGEST:
            raise ValueError(f"A message has {len(line)} bytes; the most is {LONGEST}.")
        if len(self._unsent) + len(line) > LONGEST:
            self._send_kept()
        if len(self._unsent) + len(line) > LONGEST:
            raise ConnectionBroken("the other side does not read")
        self._unsent += line
        self._send_kept()

    def _send_kept(self) -> None:
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ConnectionBroken(str(error)) from error

    def receive(self, at_most: int | None = None) -> list[dict[str, Any]]:
        """Returns the messages received since the last call, `at_most` of them.

        Raises:
          ConnectionBroken: the other side has gone and all messages have been returned, or what was
            received is no message.
        """
        broken = False
        try:
            while len(self._unread) < LONGEST:
                data = self._socket.recv(1 << 16)
                if not data:
                    broken = True
                    break
                self._unread += data
        except BlockingIOError:
            pass
        except OSError:
            broken = True
        *lines, rest = self._unread.split(b"\n")
        if (broken and not lines) or len(rest) >= LONGEST:
            raise ConnectionBroken("its connection broke")
        count = len(lines) if at_most is None else at_most
        self._unread = b"\n".join([*lines[count:], rest])
        return [_message(line) for line in lines[:count]]

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


def _cut(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > LONGEST_TEXT
    return value[: LONGEST_TEXT - 3] + "..." if is_long else value


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConnectionBroken(f"no message: {error}") from error
    if not isinstance(message, dict):
        raise ConnectionBroken("no message")
    return message
