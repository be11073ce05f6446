"""The slow link of the benchmarks: it carries all, counts it, and is as slow as it should be."""

import socket
import threading
import time

import pytest

from benchmarks.slow_link import SlowLink

pytestmark = pytest.mark.cluster
BYTES = 100_000


def answer(listening, number):
    """Sends back what connections have sent, twice."""
    for _ in range(number):
        one, _ = listening.accept()
        with one:
            received = b""
            while len(received) < BYTES:
                received += one.recv(BYTES)
            one.sendall(2 * received)


def test_it_carries_and_counts_and_keeps_the_rate_of_each_host():
    with socket.create_server(("127.0.0.1", 0)) as listening, SlowLink(megabits=8.0) as link:
        target, source = listening.getsockname()[1], 1
        thread = threading.Thread(target=answer, args=(listening, 2))
        thread.start()
        port, began = link.port_to(target, source), time.monotonic()
        for number in range(2):
            sent = bytes([number]) * BYTES
            with socket.create_connection(("127.0.0.1", port)) as one:
                one.sendall(sent)
                received = b""
                while piece := one.recv(BYTES):
                    received += piece
            assert received == 2 * sent
        seconds = time.monotonic() - began
        thread.join()
        assert link.sent == {source: 2 * BYTES, target: 4 * BYTES}
        # A million bytes a second; one after the other, since nobody answers before it has all.
        assert seconds >= 6 * BYTES / 1e6


def test_a_host_that_is_not_there_is_not_reached():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        free = listening.getsockname()[1]
    with SlowLink(8.0) as link:
        with socket.create_connection(("127.0.0.1", link.port_to(free, 1))) as one:
            assert one.recv(1) == b""
        assert link.sent == {}
