"""What processes say to each other, and what the proxy says for one of them."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from mtf_gradsync.runtimes.processes import proxy
from mtf_gradsync.runtimes.processes.members import (
    LONGEST,
    LONGEST_TEXT,
    Connection,
    ConnectionBroken,
)
from tests.forked import TIME_LIMIT


def test_the_proxy_says_what_a_connection_says():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Connection(ours).send(beat=True)
        assert theirs.recv(1000) == proxy.BEAT
        fd = ours.fileno()
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", proxy.__file__, str(os.getpid()), "0.1", str(fd)],
            pass_fds=[fd],
            stdin=subprocess.PIPE,
        )
        theirs.settimeout(30)
        said = b""
        try:
            while len(said) < 3 * len(proxy.BEAT):
                said += theirs.recv(1000)
            child.stdin.close()
            assert child.wait(TIME_LIMIT) == 0
        finally:
            child.kill()
            child.wait()
        assert said.startswith(proxy.BEAT * 3)


def test_a_stopped_process_is_seen_whatever_its_name():
    assert not proxy.is_stopped(os.getpid())
    assert not proxy.is_stopped(2**31 - 1)
    # A process sees the name that it gives itself; ") T 1 (" reads like the state of a stopped one.
    code = "open('/proc/self/comm', 'w').write(') T 1 ('); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        while pathlib.Path(f"/proc/{child.pid}/comm").read_text().strip() != ") T 1 (":
            assert child.poll() is None
        assert not proxy.is_stopped(child.pid)
        child.send_signal(19)  # SIGSTOP
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert proxy.is_stopped(child.pid)
    finally:
        child.kill()
        child.wait()
        child.stdin.close()


@pytest.fixture
def pair():
    """Two connected ends."""
    ends = [Connection(end) for end in socket.socketpair()]
    yield ends
    for end in ends:
        end.close()


def received(connection, count):
    messages = []
    while len(messages) < count:
        messages += connection.receive()
    return messages


@pytest.mark.parametrize("character", ["x", "\u00e9", "\U0001f600", "\n", '"'])
def test_a_long_text_is_cut_between_characters(pair, character):
    ours, theirs = pair
    ours.send(failed=character * (LONGEST_TEXT + 1))
    ours.send(beat=True)
    assert received(theirs, 2) == [
        {"failed": character * (LONGEST_TEXT - 3) + "..."},
        {"beat": True},
    ]


def test_messages_may_be_received_one_by_one(pair):
    """What comes right behind the last message of a meeting is for whoever reads on."""
    ours, theirs = pair
    for number in range(3):
        ours.send(number=number)
    assert theirs.receive(at_most=1) == [{"number": 0}]
    ours.close()
    assert theirs.receive(at_most=1) == [{"number": 1}]
    assert theirs.receive() == [{"number": 2}]
    with pytest.raises(ConnectionBroken):
        theirs.receive()


def test_messages_that_wait_are_sent_whole(pair):
    """More than the system keeps for a side that does not read."""
    ours, theirs = pair
    text = "x" * LONGEST_TEXT
    sent = 0

    def send_on():
        nonlocal sent
        while True:
            ours.send(failed=text, number=sent)
            sent += 1

    with pytest.raises(ConnectionBroken, match="does not read"):
        send_on()
    found = []
    while len(found) < sent:
        found += theirs.receive()
        ours._send_kept()
    assert [message["number"] for message in found] == list(range(sent))
    ours.send(beat=True)
    assert received(theirs, 1) == [{"beat": True}]


def test_what_is_not_cut_may_be_long_up_to_the_most(pair):
    ours, theirs = pair
    facts = {"cluster": "x" * 100_000}
    ours.send(facts=facts)
    messages = []
    while not messages:
        ours._send_kept()
        messages = theirs.receive()
    assert messages == [{"facts": facts}]
    with pytest.raises(ValueError, match="the most is"):
        ours.send(facts={"cluster": "x" * LONGEST})


@pytest.mark.parametrize("said", [b"x" * LONGEST, b"[" * 100_000 + b"\n", b"\xff\n", b"3\n"])
def test_what_is_no_message_breaks_the_connection(said):
    ours, theirs = socket.socketpair()
    connection = Connection(theirs)

    def receive_all(said):
        while True:
            if said:
                said = said[ours.send(said) :]
            connection.receive()

    with ours:
        ours.setblocking(False)
        with pytest.raises(ConnectionBroken):
            receive_all(said)
    connection.close()
