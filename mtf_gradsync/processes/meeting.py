"""Brings the processes of a job together before they work on one mesh.

TensorFlow waits without end for a process that never comes. jax does, too, ends a process by
SIGABRT where its coordinator does not answer, by SIGSEGV where the coordinator's port is taken. So
they meet first, over plain TCP, where whoever is missing can be named. Then the port is free again,
for jax for example; the connections stay, for the watchdog.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from typing import Any, Mapping, NamedTuple, Sequence, cast

from mtf_gradsync.processes.errors import MissingProcessesError, ProcessesError
from mtf_gradsync.processes.members import Member
from mtf_gradsync.processes.messages import Connection, ConnectionBroken

_PAUSE_S = 0.1
_GRACE_S = 5.0


class Place(NamedTuple):
    """Where the processes of a job meet.

    Attributes:
      host: the machine of process 0, as the others see it.
      port: any free one there.
      argument: what a user knows the place by.
    """

    host: str
    port: int
    argument: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port} ({self.argument})"


def meet(
    place: Place,
    me: Member,
    names: Sequence[str],
    facts: Mapping[str, Any],
    timeout: float,
) -> dict[Member, Connection]:
    """Waits until all processes are there.

    Args:
      place: where process 0 is.
      me: this process.
      names: of all processes, in their order.
      facts: what has to be the same in all processes, by the name that a user knows it under.
      timeout: seconds.

    Returns:
      On process 0 a connection to every other process, on the others one to process 0.

    Raises:
      ProcessesError: when the time is up, the port is taken, or the processes do not fit together.
    """
    end = time.monotonic() + timeout
    if me.index == 0:
        return _Host(me, facts, place).wait(names, end)
    return _join(place, me, names[0], facts, end)


class _Host:
    """Process 0 while it waits for the others."""

    def __init__(self, me: Member, facts: Mapping[str, Any], place: Place):
        self._me, self._facts, self._place = me, facts, place
        self._there: dict[int, tuple[Member, Connection]] = {}
        self._selector = selectors.DefaultSelector()

    def wait(self, names: Sequence[str], end: float) -> dict[Member, Connection]:
        with contextlib.closing(_listening(self._me, self._place)) as server, self._selector:
            self._selector.register(server, selectors.EVENT_READ, None)
            try:
                while len(self._there) < len(names) - 1:
                    self._check_time(names, end)
                    for key, _ in self._selector.select(_PAUSE_S):
                        if key.fileobj is server:
                            stranger = Connection(server.accept()[0])
                            self._selector.register(stranger, selectors.EVENT_READ, None)
                        elif key.data is None:
                            self._greet(cast("Connection", key.fileobj))
                        else:
                            # Nobody has a reason to speak: it is gone, and may be started again.
                            del self._there[key.data]
                            self._drop(cast("Connection", key.fileobj))
            finally:
                strangers: list[Any] = [
                    key.fileobj
                    for key in list(self._selector.get_map().values())
                    if key.data is None and key.fileobj is not server
                ]
                for stranger in strangers:
                    self._drop(stranger)
        for _, connection in self._there.values():
            self._tell(connection, all_here=self._me)
        return dict(self._there.values())

    def _greet(self, connection: Connection) -> None:
        """Reads the first words of somebody; port scanners and the like are dropped."""
        try:
            messages = connection.receive()
            if not messages:
                return
            member, facts = Member(*messages[0]["member"]), messages[0]["facts"]
        except (ConnectionBroken, KeyError, TypeError):
            self._drop(connection)
            return
        other = next((f"{k}={v!r} and {facts.get(k)!r}" for k, v in self._facts.items()
                      if facts.get(k) != v), None)  # fmt: skip
        if other:
            self._refuse(connection, f"{self._me} and {member} were started with {other}")
        if member.index in self._there:
            twin = self._there[member.index][0]
            self._refuse(connection, f"{twin} and {member} have the same number")
        self._selector.modify(connection, selectors.EVENT_READ, member.index)
        self._there[member.index] = member, connection

    def _check_time(self, names: Sequence[str], end: float) -> None:
        if time.monotonic() > end:
            missing = [name for i, name in enumerate(names) if i and i not in self._there]
            self._refuse(
                None,
                f"{names[0]} waited on port {self._place.port} for the {len(names)} processes of "
                f"the job, and these did not come in time: {', '.join(missing)}",
                MissingProcessesError,
            )

    def _refuse(
        self,
        connection: Connection | None,
        reason: str,
        error: type[ProcessesError] = ProcessesError,
    ) -> None:
        """Ends the start, here and for those who wait."""
        missing = error is MissingProcessesError
        for other in [connection, *(c for _, c in self._there.values())]:
            if other is not None:
                self._tell(other, refused=reason, missing=missing)
                other.close()
        raise error(f"The job cannot start: {reason}.")

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection)
        connection.close()

    @staticmethod
    def _tell(connection: Connection, **message: Any) -> None:
        with contextlib.suppress(ConnectionBroken):  # which the watchdog will say
            connection.send(**message)


def _listening(me: Member, place: Place) -> socket.socket:
    port = place.port
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise ProcessesError(
            f"{me} cannot listen on port {port} ({place.argument}), where the others meet it: "
            f"{error.strerror}. Give all processes another port; if you did not start this job "
            "twice, another program has it."
        ) from error


def _join(
    place: Place, me: Member, first: str, facts: Mapping[str, Any], end: float
) -> dict[Member, Connection]:
    why = "it has not answered"
    while time.monotonic() < end:
        try:
            connection = _connected(place)
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(_PAUSE_S)
            continue
        try:
            connection.send(member=me, facts=dict(facts))
            why = "it waits for other processes"
            # Longer than process 0 waits, because it knows who is missing.
            return {_welcome(connection, end + _GRACE_S): connection}
        except ConnectionBroken:
            # Another program's port, or a process 0 that has failed and may be started again.
            why = f"what listens there is not {first} of this job"
            connection.close()
            time.sleep(_PAUSE_S)
        except TimeoutError:
            connection.close()
    raise MissingProcessesError(
        f"{me} cannot meet {first} at {place}: {why}. Start all processes, and give each the "
        f"address of {first} as it sees it."
    )


def _connected(place: Place) -> Connection:
    sock = socket.create_connection((place.host, place.port), timeout=5)
    if sock.getsockname() == sock.getpeername():
        # On one machine, TCP connects a socket to itself where it is given the very port that it
        # asks for, and nobody listens there.
        sock.close()
        raise ConnectionRefusedError("nobody listens there")
    return Connection(sock)


def _welcome(connection: Connection, end: float) -> Member:
    """Waits for process 0's word that all are there; returns who process 0 is."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while time.monotonic() < end:
            for message in connection.receive() if selector.select(_PAUSE_S) else ():
                if "refused" in message:
                    error = MissingProcessesError if message["missing"] else ProcessesError
                    raise error(f"The job cannot start: {message['refused']}.")
                if "all_here" in message:
                    return Member(*message["all_here"])
    raise TimeoutError
