"""Brings the processes of a job together before they work on one mesh.

TensorFlow waits without end for a process that never comes, and jax does, too, or ends by a signal
without a word. So the processes meet first, over plain TCP, where whoever is missing can be named.
Then the port is free again, for jax for example; the connections stay, for the watchdog.

Where a job has a secret, both sides show that they have it before they believe each other.
"""

from __future__ import annotations

import selectors
import socket
import time
from typing import Any, Iterator, Mapping, Sequence

from mtf_gradsync.processes import secret
from mtf_gradsync.processes.errors import MissingProcessesError, ProcessesError
from mtf_gradsync.processes.host import ANSWER_S, Host, Introduction
from mtf_gradsync.processes.members import Member
from mtf_gradsync.processes.messages import Connection, ConnectionBroken
from mtf_gradsync.processes.place import Place

_PAUSE_S = 0.1
_GRACE_S = 5.0

__all__ = ["Place", "meet"]


def meet(
    place: Place,
    me: Member,
    names: Sequence[str],
    facts: Mapping[str, Any],
    timeout: float,
) -> dict[Member, Connection]:
    """Waits until all processes of a job are there, and returns the connections between them.

    Process 0 gets a connection to every other process, the others one to process 0, whose address
    is `place`. `names` are those of all processes in their order, `facts` settings that have to be
    equal in all, by the user's names for them; `timeout` is in seconds.

    Raises:
      ProcessesError: when the time is up, the port is taken, or the processes do not fit together.
    """
    end = time.monotonic() + timeout
    if me.index == 0:
        return Host(me, facts, place).wait(names, end)
    return _join(place, me, names[0], facts, end)


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
            theirs = _challenge(connection, min(end, time.monotonic() + ANSWER_S))
            mine = secret.challenge()
            proof = secret.proof("process", theirs, mine)
            said = Introduction(me, dict(facts), mine, proof)
            connection.send(**said._asdict())
            why = "it waits for other processes"
            # Longer than process 0 waits, because it knows who is missing.
            return {_welcome(connection, place, first, mine, end + _GRACE_S): connection}
        except ConnectionBroken:
            # Another program's port, or a process 0 that has failed and may be started again.
            why = f"what listens there is not {first} of this job"
            connection.close()
            time.sleep(_PAUSE_S)
        except TimeoutError:
            connection.close()
        except BaseException:
            connection.close()
            raise
    raise MissingProcessesError(
        f"{me} cannot meet {first} at {place}: {why}. Start all processes, and give each the "
        f"address of {first} as it sees it."
    )


def _connected(place: Place) -> Connection:
    sock = socket.create_connection((place.loopback or place.host, place.port), timeout=5)
    if sock.getsockname() == sock.getpeername():
        # On one machine, TCP connects a socket to itself where it is given the very port that it
        # asks for, and nobody listens there.
        sock.close()
        raise ConnectionRefusedError("nobody listens there")
    return Connection(sock)


def _messages_of_host(connection: Connection, end: float) -> Iterator[dict[str, Any]]:
    """Yields the messages of process 0 until a time is up."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while time.monotonic() < end:
            # One by one: what follows the welcome is for the watchdog, such as an early error.
            messages = connection.receive(at_most=1)
            if not messages:
                selector.select(_PAUSE_S)
            yield from messages


def _challenge(connection: Connection, end: float) -> str:
    """Returns the challenge that process 0 sends first."""
    for message in _messages_of_host(connection, end):
        if isinstance(message.get("challenge"), str):
            return message["challenge"]
        break
    raise ConnectionBroken("it asks nothing")


def _welcome(connection: Connection, place: Place, first: str, mine: str, end: float) -> Member:
    """Waits until process 0 says that all are there, and returns the member that process 0 is."""
    for message in _messages_of_host(connection, end):
        if "denied" in message:
            here = "has one" if secret.is_set() else "has none"
            raise ProcessesError(
                f"{first} at {place} does not take this process for one of its job: the "
                f"environment variable {secret.VARIABLE} is not the same in both; this one {here}."
            )
        if "refused" in message:
            error = MissingProcessesError if message.get("missing") else ProcessesError
            raise error(f"The job cannot start: {message['refused']}.")
        if "all_here" in message:
            if not secret.is_proof(message.get("proof"), "process 0", mine):
                raise ConnectionBroken("it has another secret")
            return Member(*message["all_here"])
    raise TimeoutError
