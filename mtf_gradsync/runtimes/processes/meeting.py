"""Brings the processes of a job together before they work on one mesh.

TensorFlow waits forever for a process that never comes. jax also waits forever, or is ended by a
signal without a message. So the processes of a job first connect to each other over plain TCP,
where an error can name the missing processes. After this meeting the port at which the processes
met is free again, for jax for example. The connections stay open, because the watchdog uses them.

If a job has a secret, both sides of a connection prove that they have the secret before they trust
each other. Every exported step contains a copy of this module and of the module `members`.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from typing import Any, Iterator, Mapping, NamedTuple, Sequence, cast

from .members import (
    SECRET_VARIABLE,
    Connection,
    ConnectionBroken,
    MeetingAddress,
    Member,
    MissingProcessesError,
    ProcessesError,
    has_secret,
    is_secret_proof,
    new_challenge,
    printable,
    secret_proof,
)

_logger = logging.getLogger(__name__)
#: Seconds that process 0 may take for its first word, and a stranger for its first message.
ANSWER_S = 10.0
_PAUSE_S = 0.1
# Unknown callers allowed at once, or the number of processes if that is more.
_STRANGERS = 64


class _Stranger(NamedTuple):
    """A caller of process 0 that has not said yet which process it is.

    `connection` is the connection to the caller, and `address` is the caller's address, for
    messages. `challenge` is the random text for which the caller has to send a proof of the secret.
    `since` is the time of the call, by `time.monotonic`.
    """

    connection: Connection
    address: str
    challenge: str  # the random text for which the caller has to send a proof
    since: float  # when it called, by `time.monotonic`


class Introduction(NamedTuple):
    """The first message of a process to process 0.

    `member` is the process, and `facts` are the settings that it was started with. `proof` proves
    that the process has the secret, and `challenge` is a random text for which process 0 has to
    send a proof in return.
    """

    member: Member
    facts: dict[str, Any]  # the settings that the process was started with
    challenge: str  # random text for which process 0 has to send a proof
    proof: str  # proves that the process has the secret

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Introduction:
        """Returns the introduction in a message; raises ConnectionBroken if there is none."""
        try:
            said = cls(*(message[name] for name in cls._fields))
        except KeyError as error:
            raise ConnectionBroken(f"no introduction: it lacks {error}") from error
        if [type(x) for x in said[1:]] != [dict, str, str]:
            raise ConnectionBroken("no introduction")
        return said._replace(member=Member.of(said.member))


class Host:
    """The side of process 0 in a meeting: it accepts and checks the other processes.

    `me` is process 0, and `place` is the address at which process 0 listens. `facts` are the
    settings of process 0, which have to be equal in all processes.
    """

    def __init__(self, me: Member, facts: Mapping[str, Any], place: MeetingAddress):
        self._me, self._facts, self._place = me, facts, place
        self._arrived: dict[int, tuple[Introduction, Connection]] = {}
        self._selector = selectors.DefaultSelector()
        self._strangers: list[_Stranger] = []
        self._denied = False  # whether somebody has had another secret

    def wait(self, names: Sequence[str], end: float) -> dict[Member, Connection]:
        """Waits for all other processes; returns the connections to them.

        `names` are the names of all processes in their order. Raises a ProcessesError if not all of
        them have come at the time `end`, by `time.monotonic`, if the port is taken, or if the
        settings or numbers of the processes do not fit together.
        """
        with contextlib.closing(_listening(self._me, self._place)) as server, self._selector:
            self._selector.register(server, selectors.EVENT_READ, None)
            try:
                while len(self._arrived) < len(names) - 1:
                    self._check_time(names, end)
                    self._drop_idle_callers(max(len(names), _STRANGERS))
                    for key, _ in self._selector.select(_PAUSE_S):
                        if key.fileobj is server:
                            self._accept(server)
                        elif isinstance(key.data, _Stranger):
                            self._read_introduction(key.data, len(names))
                        else:
                            # Processes send nothing while they wait: this one is gone.
                            del self._arrived[key.data]
                            gone = cast("Connection", key.fileobj)
                            self._selector.unregister(gone)
                            gone.close()
            finally:
                for stranger in list(self._strangers):
                    self._drop(stranger)
        for said, connection in self._arrived.values():
            proof = secret_proof("process 0", said.challenge)
            self._send(connection, all_here=self._me, proof=proof)
        return {said.member: connection for said, connection in self._arrived.values()}

    def _accept(self, server: socket.socket) -> None:
        try:
            accepted, (address, *_) = server.accept()
        except OSError:  # it is gone already, or this process has too many files open
            return
        connection = Connection(accepted)
        stranger = _Stranger(connection, address, new_challenge(), time.monotonic())
        self._strangers.append(stranger)
        self._selector.register(connection, selectors.EVENT_READ, stranger)
        self._send(connection, challenge=stranger.challenge)

    def _drop_idle_callers(self, most: int) -> None:
        """Drops callers that send nothing for `ANSWER_S` seconds, and the oldest above `most`.

        `most` is the number of callers that may wait at the same time. If more callers wait, those
        that called first are dropped.
        """
        late = time.monotonic() - ANSWER_S
        extra = len(self._strangers) - most
        for number, stranger in enumerate(list(self._strangers)):
            if number < extra or stranger.since < late:
                self._drop(stranger)

    def _read_introduction(self, stranger: _Stranger, num_processes: int) -> None:
        """Reads a caller's introduction, and accepts the caller if it is a process of the job.

        An introduction is the caller's first message, which says which process it is. `stranger` is
        the caller. It is dropped if it does not have the secret, or if a job of `num_processes`
        processes has no process with the caller's number. If a process was started with other
        settings than process 0, or has the same number as another process, the start ends with a
        ProcessesError in all processes.
        """
        if stranger not in self._strangers:
            return
        connection = stranger.connection
        try:
            messages = connection.receive()
            if not messages:
                return
            said = Introduction.of(messages[0])
        except ConnectionBroken as error:
            self._reject_caller(stranger, f"what it sent is no introduction of a process ({error})")
            return
        if not is_secret_proof(said.proof, "process", stranger.challenge, said.challenge):
            if not self._denied:
                _logger.warning(
                    "%s refused a caller at %s, whose %s is not the same.",
                    self._me, stranger.address, SECRET_VARIABLE,
                )  # fmt: skip
            self._denied = True
            self._send(connection, denied=True)
            self._drop(stranger)
            return
        member, facts, here = said.member, said.facts, self._facts
        other = [f"{k}={here.get(k)!r} and {facts.get(k)!r}" for k in {**here, **facts}
                 if here.get(k) != facts.get(k)]  # fmt: skip
        if other:
            self._fail_start(
                connection, f"{self._me} and {member} were started with {', '.join(other)}"
            )
        if not 0 < member.index < num_processes:
            self._reject_caller(
                stranger,
                f"a job of {num_processes} processes has no process {member.index} to join",
            )
            return
        if member.index in self._arrived:
            twin = self._arrived[member.index][0].member
            self._fail_start(connection, f"{twin} and {member} have the same number")
        self._strangers.remove(stranger)
        self._selector.modify(connection, selectors.EVENT_READ, member.index)
        self._arrived[member.index] = said, connection

    def _check_time(self, names: Sequence[str], end: float) -> None:
        if time.monotonic() > end:
            missing = [name for i, name in enumerate(names) if i and i not in self._arrived]
            denied = (
                f". A caller with another {SECRET_VARIABLE} was refused" if self._denied else ""
            )
            self._fail_start(
                None,
                f"{names[0]} waited on port {self._place.port} for the {len(names)} processes of "
                f"the job, and these did not come in time: {', '.join(missing)}{denied}",
                MissingProcessesError,
            )

    def _fail_start(
        self,
        connection: Connection | None,
        reason: str,
        error: type[ProcessesError] = ProcessesError,
    ) -> None:
        """Ends the start of the job: raises an error here and in all processes that have come.

        `connection` is the connection to a caller that is refused; the caller raises the error,
        too. If no caller is refused, `connection` is None. `reason` is the text of the error, and
        `error` is the error's class.
        """
        missing = error is MissingProcessesError
        for other in [connection, *(c for _, c in self._arrived.values())]:
            if other is not None:
                self._send(other, refused=reason, missing=missing)
                other.close()
        raise error(f"The job cannot start: {reason}.")

    def _reject_caller(self, stranger: _Stranger, reason: str) -> None:
        """Drops the caller `stranger`, and sends it the text `reason`; the start goes on."""
        self._send(stranger.connection, refused=f"{self._me} refused a caller: {reason}")
        self._drop(stranger)

    def _drop(self, stranger: _Stranger) -> None:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.connection)
        stranger.connection.close()

    @staticmethod
    def _send(connection: Connection, **message: Any) -> None:
        with contextlib.suppress(ConnectionBroken):  # which the watchdog will say
            connection.send(**message)


def _listening(me: Member, place: MeetingAddress) -> socket.socket:
    host, port = place.listening_address or "", place.port
    if not place.loopback and not has_secret():
        _logger.warning(
            "%s listens on port %d of %s, and accepts every caller as a process of the job. "
            "Set the environment variable %s to the same text in all processes; if all are on "
            "this machine, meet at 127.0.0.1.",
            me, port, host or "all its addresses", SECRET_VARIABLE,
        )  # fmt: skip
    is_v6 = ":" in host if host else socket.has_dualstack_ipv6()
    try:
        server = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if is_v6 else socket.AF_INET,
            dualstack_ipv6=is_v6 and not host,
        )
    except OSError as error:
        raise ProcessesError(
            f"{me} cannot listen on port {port} ({place.argument}), where the others meet it: "
            f"{error.strerror}. Give all processes another port; if you did not start this job "
            "twice, another program has it."
        ) from error
    # A caller may be gone before it is accepted.
    server.setblocking(False)
    return server


_GRACE_S = 5.0

__all__ = ["MeetingAddress", "meet", "meet_at"]


def meet(
    place: MeetingAddress,
    me: Member,
    names: Sequence[str],
    facts: Mapping[str, Any],
    timeout: float,
) -> dict[Member, Connection]:
    """Waits until all processes of a job have come; returns this process's connections to others.

    `me` is this process. Process 0 gets a connection to every other process. Each other process
    gets a connection to process 0, whose address is `place`. `names` are the names of all processes
    in their order.
    `facts` are settings that have to be equal in all processes; the keys are the names by which
    users know these settings. `timeout` is in seconds.

    Raises:
      ProcessesError: when the time is up, the port is taken, or the settings or numbers of the
        processes do not fit together.
    """
    end = time.monotonic() + timeout
    if me.index == 0:
        return Host(me, facts, place).wait(names, end)
    return _join(place, me, names[0], facts, end)


class MeetingResult(NamedTuple):
    """The result of `meet_at`: the processes of a job of XLA devices, and where they have met.

    `me` is this process, and `peers` has its connections to other processes. `bind_address` is the
    address at which jax's coordinator listens on process 0; None for all addresses of the machine.
    `loopback` is the host of the meeting if it is a loopback address, else None.
    """

    me: Member
    peers: dict[Member, Connection]  # as `meet` returns them
    bind_address: str | None  # where jax's coordinator listens on process 0; None: everywhere
    loopback: str | None  # the address where they met, if it is a loopback address


def meet_at(
    address: str, num_processes: int, process_id: int, facts: Mapping[str, Any], timeout: float
) -> MeetingResult:
    """Waits until all processes of a job of XLA devices have come; returns the connections.

    `address` is the "host:port" of process 0, at which the processes meet. `num_processes` is the
    number of processes of the job, and `process_id` is this process's number. `facts` are settings
    that have to be equal in all processes, by the names that users know.

    Raises a ProcessesError when `timeout` seconds have passed, when the port is taken, or when the
    settings or numbers of the processes do not fit together.
    """
    place = MeetingAddress.of(address, "coordinator")
    names = [f"process {index}" for index in range(num_processes)]
    me = Member.this(process_id, names[process_id])
    peers = meet(place, me, names, facts, timeout)
    return MeetingResult(me, peers, address if place.listening_address else None, place.loopback)


def _join(
    place: MeetingAddress, me: Member, first: str, facts: Mapping[str, Any], end: float
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
            # Process 0 first sends random text, to get a proof of the secret.
            answers = _messages_of_host(connection, min(end, time.monotonic() + ANSWER_S))
            theirs = next(answers, {}).get("challenge")
            if not isinstance(theirs, str):
                raise ConnectionBroken("it asks nothing")
            challenge = new_challenge()
            proof = secret_proof("process", theirs, challenge)
            said = Introduction(me, dict(facts), challenge, proof)
            connection.send(**said._asdict())
            why = "it waits for other processes"
            # Longer than process 0 waits, because process 0 knows which processes are missing.
            welcome = _wait_for_welcome(connection, place, first, challenge, end + _GRACE_S)
            return {welcome: connection}
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
        f"{me} cannot meet {first} at {place}: {why}. Start all processes, and give each "
        f"process the address at which it reaches {first}."
    )


def _connected(place: MeetingAddress) -> Connection:
    sock = socket.create_connection((place.loopback or place.host, place.port), timeout=5)
    if sock.getsockname() == sock.getpeername():
        # On one machine, TCP connects a socket to itself if nobody listens at the port and the
        # socket itself happens to get this port.
        sock.close()
        raise ConnectionRefusedError("nobody listens there")
    return Connection(sock)


def _messages_of_host(connection: Connection, end: float) -> Iterator[dict[str, Any]]:
    """Yields the messages that come from process 0, until the time `end` by `time.monotonic`.

    `connection` is this process's connection to process 0.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while time.monotonic() < end:
            # One by one: messages after the welcome, such as an early error, are for the watchdog.
            messages = connection.receive(at_most=1)
            if not messages:
                selector.select(_PAUSE_S)
            yield from messages


def _wait_for_welcome(
    connection: Connection, place: MeetingAddress, first: str, challenge: str, end: float
) -> Member:
    """Waits until process 0 says that all processes have come; returns process 0.

    Args:
      connection: this process's connection to process 0.
      place: the address of process 0, for errors.
      first: the name of process 0, for errors.
      challenge: this process's challenge, for which process 0 has to send a proof.
      end: the time, by `time.monotonic`, at which the wait ends.

    Raises:
      ProcessesError: when process 0 has refused this process, or has ended the start.
      ConnectionBroken: when process 0 does not have the secret.
      TimeoutError: when no answer has come until `end`.
    """
    for message in _messages_of_host(connection, end):
        if "denied" in message:
            here = "has one" if has_secret() else "has none"
            raise ProcessesError(
                f"{first} at {place} does not accept this process as one of its job: the "
                f"environment variable {SECRET_VARIABLE} is not the same in both processes; this "
                f"one {here}."
            )
        if "refused" in message:
            error = MissingProcessesError if message.get("missing") else ProcessesError
            raise error(f"The job cannot start: {printable(str(message['refused']))}.")
        if "all_here" in message:
            if not is_secret_proof(message.get("proof"), "process 0", challenge):
                raise ConnectionBroken("it has another secret")
            return Member.of(message["all_here"])
    raise TimeoutError
