"""Processes that cannot meet say why."""

import concurrent.futures
import contextlib
import json
import logging
import socket
import threading
import time

import pytest

from benchmarks.cluster import free_ports
from mtf_gradsync.runtimes.processes import meeting, members
from mtf_gradsync.runtimes.processes.meeting import MeetingAddress, meet
from mtf_gradsync.runtimes.processes.members import (
    LONGEST,
    Member,
    MissingProcessesError,
    ProcessesError,
)

FACTS = {"jax": "1.2.3", "cpu_devices": 4}


def member(index):
    return Member(index, "here", 1000 + index, f"process {index}")


def a_meeting(port, index, count=2, facts=FACTS, timeout=60.0):
    names = [f"process {i}" for i in range(count)]
    return meet(
        MeetingAddress("127.0.0.1", port, "coordinator"), member(index), names, facts, timeout
    )


def close(*found):
    """Closes the connections of processes that have met."""
    for connections in found:
        for connection in connections.values():
            connection.close()


def met(count, indices, timeout=60.0, facts=None):
    """What each of some processes gets from their meeting: connections, or an error."""
    for _ in range(10):
        (port,) = free_ports(1)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            tasks = [
                pool.submit(a_meeting, port, i, count, own, timeout)
                for i, own in zip(indices, facts or [FACTS] * len(indices))
            ]
        found = [task.exception() or task.result() for task in tasks]
        # Another program may have taken the port in between.
        if not (isinstance(found[0], Exception) and "cannot listen" in str(found[0])):
            return found
    raise RuntimeError(found)


def test_process_0_is_connected_with_all_others():
    found = met(3, [0, 1, 2])
    assert [set(connections) for connections in found] == [
        {member(1), member(2)},
        {member(0)},
        {member(0)},
    ]
    for other in (1, 2):
        found[other][member(0)].send(hello=other)
        end = time.monotonic() + 60
        messages = []
        while not messages and time.monotonic() < end:
            messages = found[0][member(other)].receive()
        assert messages == [{"hello": other}]
    close(*found)


def test_one_process_meets_nobody():
    assert met(1, [0]) == [{}]


def connected(port):
    """A connection to process 0 as soon as it listens."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), timeout=30)
        time.sleep(0.01)
    raise TimeoutError


def introduction(asked, **changed):
    """What a process says first, in a job without a secret."""
    said = {
        "member": member(1),
        "facts": FACTS,
        "challenge": "x",
        "proof": members.secret_proof("process", asked, "x"),
    }
    return (json.dumps({**said, **changed}) + "\n").encode()


GARBAGE = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "no text": bytes(range(255, 0, -1)),
    "no object": b"1\n",
    "nothing in it": b"{}\n",
    "too deep": b"[" * 100_000 + b"\n",
    "facts that are none": {"facts": 3},
    "a member that is none": {"member": ["1", "here", 2, "process 1"]},
    "a member without all fields": {"member": [1, "here"]},
    "a member of no job": {"member": [7, "here", 2, "process 7"]},
    "a proof that is none": {"proof": 3},
}


@pytest.fixture
def intruders():
    """Takes connections, to be closed when the test is over."""
    with contextlib.ExitStack() as stack:
        yield lambda port: stack.enter_context(connected(port))


def test_strangers_are_dropped(intruders):
    """The other process comes only when all of them have been there."""
    (port,) = free_ports(1)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(a_meeting, port, 0)
        for kind, said in GARBAGE.items():
            stranger, heard = intruders(port), b""
            asked = json.loads(stranger.recv(1000))["challenge"]
            with contextlib.suppress(ConnectionError):
                stranger.sendall(said if isinstance(said, bytes) else introduction(asked, **said))
                while new := stranger.recv(1000):
                    heard += new
            if isinstance(said, dict) or kind == "nothing in it":
                refusal = json.loads(heard)["refused"]
                assert refusal.startswith("process 0 (host here, pid 1000) refused a caller: "), (
                    kind
                )
        second = pool.submit(a_meeting, port, 1)
    close(first.result(), second.result())


def talk(connection, said):
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(said)


@pytest.mark.slow
def test_who_says_nothing_or_never_ends_holds_nobody_up(intruders, monkeypatch):
    monkeypatch.setattr(meeting, "_STRANGERS", 4)
    (port,) = free_ports(1)
    talkers = []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(a_meeting, port, 0)
        for said in (b"x" * LONGEST, b"{}\n" * 1000, b'{"a": "' + b"x" * LONGEST):
            talkers.append(threading.Thread(target=talk, args=(intruders(port), said)))
            talkers[-1].start()
        silent = [intruders(port) for _ in range(12)]
        second = pool.submit(a_meeting, port, 1)
        close(first.result(), second.result())
    for talker in talkers:
        talker.join(30)
        assert not talker.is_alive()
    for stranger in silent:  # all are dropped, by their number or in the end
        with contextlib.suppress(ConnectionError):
            while stranger.recv(1000):
                pass


def test_strangers_have_some_time_only(intruders, monkeypatch):
    monkeypatch.setattr(meeting, "ANSWER_S", 0.3)
    (port,) = free_ports(1)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(a_meeting, port, 0)
        stranger = intruders(port)
        assert b"challenge" in stranger.recv(1000)
        assert stranger.recv(1000) == b""
        second = pool.submit(a_meeting, port, 1)
    close(first.result(), second.result())


def test_where_all_are_on_one_machine_nobody_else_can_call(caplog):
    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        (port,) = free_ports(1)
        for name, address in (("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1")):
            with meeting._listening(member(0), MeetingAddress(name, port, "coordinator")) as server:
                assert server.getsockname()[:2] == (address, port)
        assert not caplog.records
        with meeting._listening(
            member(0), MeetingAddress("first.example", port, "coordinator")
        ) as server:
            assert server.getsockname()[0] in ("::", "0.0.0.0")
    (warning,) = caplog.records
    assert members.SECRET_VARIABLE in warning.getMessage()


def test_with_a_secret_it_may_be_called_from_everywhere(monkeypatch, caplog):
    monkeypatch.setenv(members.SECRET_VARIABLE, "tell nobody")
    (port,) = free_ports(1)
    with meeting._listening(member(0), MeetingAddress("first.example", port, "coordinator")):
        assert not caplog.records


def test_a_machines_own_name_is_not_taken_for_this_machine_alone():
    """Many resolve it to 127.0.1.1, and others do not."""
    assert MeetingAddress(socket.gethostname(), 1, "coordinator").loopback is None
    assert MeetingAddress("::1", 1, "coordinator").loopback == "::1"


def test_it_listens_at_the_address_that_was_named_if_it_is_one_of_this_machine():
    own = {host: MeetingAddress(host, 1, "coordinator").listening_address for host in
           ("localhost", "127.0.0.2", "203.0.113.9", "first.example")}  # fmt: skip
    assert own == {
        "localhost": "127.0.0.1", "127.0.0.2": "127.0.0.2", "203.0.113.9": None,
        "first.example": None,
    }  # fmt: skip


def test_who_has_another_secret_is_denied(intruders, monkeypatch, caplog):
    monkeypatch.setenv(members.SECRET_VARIABLE, "tell nobody")
    (port,) = free_ports(1)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(a_meeting, port, 0)
        stranger = intruders(port)
        stranger.recv(1000)
        stranger.sendall(introduction("made up"))
        assert b"denied" in stranger.recv(1000)
        second = pool.submit(a_meeting, port, 1)
        close(first.result(), second.result())
    assert [r for r in caplog.records if members.SECRET_VARIABLE in r.getMessage()]


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ({"denied": True}, ProcessesError, "MTF_GRADSYNC_SECRET is not the same in both"),
        (
            {"all_here": member(0), "proof": "made up"},
            MissingProcessesError,
            "is not process 0 of this job",
        ),
        ({"all_here": 3, "proof": None}, MissingProcessesError, "is not process 0 of this job"),
        ({"all_here": [0, "here"]}, MissingProcessesError, "is not process 0 of this job"),
        ({"all_here": 3}, MissingProcessesError, "is not process 0 of this job"),
        ({"refused": ["\x1b[2J"]}, ProcessesError, "cannot start: .'.x1b.2J'."),
    ],
)
@pytest.mark.mostly_slow
def test_who_is_not_process_0_of_the_job_is_not_believed(answer, error, message):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)

        def pretend():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b'{"challenge": "x"}\n')
                asked = json.loads(connection.recv(1000))["challenge"]
                # In a job without a secret anybody can make the right proof.
                proof = members.secret_proof("process 0", asked)
                connection.sendall((json.dumps({"proof": proof, **answer}) + "\n").encode())
                connection.recv(1000)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(error, match=message):
            a_meeting(server.getsockname()[1], 1, timeout=1.5)
        thread.join()


def test_processes_that_do_not_come_are_named():
    found = met(4, [0, 2], timeout=2.0)
    for error in found:
        assert isinstance(error, MissingProcessesError)
        assert (
            "4 processes of the job, and these did not come in time: process 1, process 3"
            in str(error)
        )


def test_no_coordinator_is_an_error_with_its_address():
    (error,) = met(2, [1], timeout=0.5)
    assert isinstance(error, MissingProcessesError)
    assert "cannot meet process 0 at 127.0.0.1:" in str(error)
    assert "refused" in str(error)


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ProcessesError, match=f"cannot listen on port {port} .coordinator"):
            a_meeting(port, 0, timeout=1.0)


def test_what_only_one_process_was_started_with_is_named():
    for facts in ([FACTS, {**FACTS, "--steps": 4}], [{**FACTS, "--steps": 4}, FACTS]):
        for error in met(2, [0, 1], facts=facts):
            assert "started with --steps=" in str(error)
            assert "None" in str(error)


def test_processes_that_were_started_differently_are_named():
    found = met(2, [0, 1], facts=[FACTS, {**FACTS, "jax": "1.2.4"}])
    for error in found:
        assert isinstance(error, ProcessesError)
        assert "with jax='1.2.3' and '1.2.4'" in str(error)
        assert "process 0 (host here, pid 1000) and process 1 (host here, pid 1001)" in str(error)


def test_two_processes_of_one_number_are_named():
    errors = [error for error in met(3, [0, 1, 1]) if isinstance(error, Exception)]
    assert any("have the same number" in str(error) for error in errors)
