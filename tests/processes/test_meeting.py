"""Processes that cannot meet say why."""

import concurrent.futures
import socket
import time

import pytest

from benchmarks.cluster import free_ports
from mtf_gradsync.processes.errors import MissingProcessesError, ProcessesError
from mtf_gradsync.processes.meeting import Place, meet
from mtf_gradsync.processes.members import Member

FACTS = {"jax": "1.2.3", "cpu_devices": 4}


def member(index):
    return Member(index, "here", 1000 + index, f"process {index}")


def meeting(port, index, count=2, facts=FACTS, timeout=60.0):
    names = [f"process {i}" for i in range(count)]
    return meet(Place("127.0.0.1", port, "coordinator"), member(index), names, facts, timeout)


def met(count, indices, timeout=60.0, facts=None):
    """What each of some processes gets from their meeting: connections, or an error."""
    for _ in range(10):
        (port,) = free_ports(1)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            tasks = [
                pool.submit(meeting, port, i, count, own, timeout)
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
    for connections in found:
        for connection in connections.values():
            connection.close()


def test_one_process_meets_nobody():
    assert met(1, [0]) == [{}]


def test_strangers_are_ignored():
    def stranger(port):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    assert connection.recv(100) == b""
                return
            except ConnectionRefusedError:
                time.sleep(0.01)

    # The other one comes only when the stranger has been there.
    (port,) = free_ports(1)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        host = pool.submit(meeting, port, 0)
        stranger(port)
        other = pool.submit(meeting, port, 1)
    for connections in (host.result(), other.result()):
        for connection in connections.values():
            connection.close()


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
            meeting(port, 0, timeout=1.0)


def test_processes_that_were_started_differently_are_named():
    found = met(2, [0, 1], facts=[FACTS, {**FACTS, "jax": "1.2.4"}])
    for error in found:
        assert isinstance(error, ProcessesError)
        assert "with jax='1.2.3' and '1.2.4'" in str(error)
        assert "process 0 (host here, pid 1000) and process 1 (host here, pid 1001)" in str(error)


def test_two_processes_of_one_number_are_named():
    errors = [error for error in met(3, [0, 1, 1]) if isinstance(error, Exception)]
    assert any("have the same number" in str(error) for error in errors)
