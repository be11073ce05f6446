"""The processes of a job, the messages between them, and the errors of losing a process."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
from typing import Any, NamedTuple


class Member(NamedTuple):
    """A process of a job: its number in the job, host, process id and name."""

    index: int  # type: ignore[assignment]  # in place of the method of tuples, which none calls
    host: str
    pid: int
    name: str  # in the job: "process 1", "worker 1"

    def __str__(self) -> str:
        return f"{self.name} (host {self.host}, pid {self.pid})"

    @classmethod
    def this(cls, index: int, name: str) -> Member:
        """Returns this process as a member of a job, with its `index` and `name` in the job."""
        return cls(index, socket.gethostname(), os.getpid(), name)

    @classmethod
    def of(cls, fields: Any) -> Member:
        """Returns the member that a message describes.

        `fields` is a list of index, host, pid and name. Raises ConnectionBroken if `fields` is
        something else.
        """
        if not isinstance(fields, list) or [type(x) for x in fields] != [int, str, int, str]:
            raise ConnectionBroken(f"no process of a job: {fields!r:.80}")
        index, host, pid, name = fields
        return cls(index, printable(host), pid, printable(name))


class MeetingAddress(NamedTuple):
    """The address at which the processes of a job meet."""

    host: str  # the machine of process 0, as the others see it
    port: int  # a free port of that machine
    argument: str  # the argument by which a user gave the address, for errors

    def __str__(self) -> str:
        return f"{self.host}:{self.port} ({self.argument})"

    @classmethod
    def of(cls, text: str, argument: str) -> MeetingAddress:
        """Parses an address "host:port", which a user has given as the argument `argument`.

        Raises a ValueError that names the argument if `text` is no such address.
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"{argument} must be like 'host:1234', got {text!r}.")
        return cls(host.strip("[]"), int(port), argument)

    @property
    def listening_address(self) -> str | None:
        """The IP address of this machine to listen at; None to listen at all of its addresses.

        The address is `host`, if `host` is an IP address of this machine. A host's name is not
        used, because it may stand for another address on this machine than on the other machines.
        """
        host = self.loopback or self.host
        with contextlib.suppress(ValueError, OSError):
            is_v6 = ipaddress.ip_address(host).version == 6
            with socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET) as probe:
                probe.bind((host, 0))
                return host
        return None

    @property
    def loopback(self) -> str | None:
        """The host, if it is a loopback address, which only this machine can reach; else None."""
        # A machine's name is not resolved: many machines resolve their own name to 127.0.1.1, which
        # is not the address that other machines know.
        host = "127.0.0.1" if self.host == "localhost" else self.host
        with contextlib.suppress(ValueError):
            return host if ipaddress.ip_address(host).is_loopback else None
        return None


def all_given(caller: str, otherwise: str, **arguments: Any) -> bool:
    """Returns True if no argument is None, and False if all are; raises ValueError otherwise.

    `arguments` are three arguments, by name, that users of the function `caller` can only give
    together. The text `otherwise` says from where their values come if none of them is given. This
    text is the end of the error's last sentence, "Give all three, or none of them <otherwise>."
    """
    missing = [name for name, value in arguments.items() if value is None]
    if missing and len(missing) < len(arguments):
        raise ValueError(
            f"{caller} got {', '.join(n for n in arguments if n not in missing)} without "
            f"{' and '.join(missing)}. Give all three, or none of them {otherwise}."
        )
    return not missing


# EX_TEMPFAIL of sysexits.h: nothing is wrong with the program. If started again, it goes on.
LOST_PROCESS_EXIT_CODE = 75


class ProcessesError(RuntimeError):
    """The error of processes that cannot work together on one mesh."""


class MissingProcessesError(ProcessesError):
    """The error of a start for which some processes came too late; starting again may help."""


#: The most characters of a text in a message. Of a longer text the beginning is sent.
LONGEST_TEXT = 1 << 12
#: The most bytes of a message, and of messages held back while the other side does not read.
LONGEST = 1 << 20


class ConnectionBroken(Exception):
    """The error of a connection that has ended, or on which an unknown message came."""


class Connection:
    """One end of a connected socket for JSON messages. Its methods return at once."""

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
        """Sends a message: the arguments by name, as JSON.

        While the other side does not read, messages are held back and sent later. Texts are cut
        after `LONGEST_TEXT` characters.

        Raises:
          ValueError: when the message has more than `LONGEST` bytes.
          ConnectionBroken: when the other side has closed the connection, or more than `LONGEST`
            bytes would be held back.
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
        """Returns the messages received since the last call, at most `at_most` of them.

        Raises:
          ConnectionBroken: when the other side has closed the connection and all messages have been
            returned, or when what was received is no message.
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


def printable(text: str) -> str:
    """Returns `text`, of another process, with "?" for characters that could control a terminal."""
    return "".join(x if x.isprintable() else "?" for x in text)


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


#: The environment variable with the job's secret.
SECRET_VARIABLE = "MTF_GRADSYNC_SECRET"


def has_secret() -> bool:
    """Returns whether this process has a secret in the environment variable MTF_GRADSYNC_SECRET."""
    return bool(os.environ.get(SECRET_VARIABLE))


def new_challenge() -> str:
    """Returns random text, for which the other side has to compute a proof."""
    return secrets.token_hex(16)


def secret_proof(role: str, *challenges: str) -> str:
    """Returns hexadecimal digits that prove that this process has the secret.

    The digits depend on `challenges`, the random texts that both sides of a connection have sent,
    and on `role`, which names the side that proves. So neither side can send back the other side's
    proof as its own.
    """
    key = os.environ.get(SECRET_VARIABLE, "").encode()
    return hmac.new(key, json.dumps([role, *challenges]).encode(), hashlib.sha256).hexdigest()


def is_secret_proof(given: Any, role: str, *challenges: str) -> bool:
    """Returns whether the other side's proof shows that it has the same secret as this process.

    `given` is what the other side has sent as its proof: the result of its call of `secret_proof`.
    `role` and `challenges` are the arguments that the other side must have called it with: the name
    of the other side, "process" or "process 0", and the random texts of this connection. The
    result is False if `given` is no text, or was made with another secret, role or challenge.
    """
    expected = secret_proof(role, *challenges).encode()
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), expected)
