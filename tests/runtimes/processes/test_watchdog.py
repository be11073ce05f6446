"""What a process does whose process 0 ends."""

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest

from mtf_gradsync.runtimes.processes.members import LOST_PROCESS_EXIT_CODE, Connection, Member
from mtf_gradsync.runtimes.processes.watchdog import Watchdog
from tests.forked import TIME_LIMIT

# Its threads write as jax's do, without an end.
LOUD = """
import os, socket, threading
from mtf_gradsync.runtimes.processes.members import Member
from mtf_gradsync.runtimes.processes.members import Connection
from mtf_gradsync.runtimes.processes.watchdog import Watchdog

def shout(descriptor):
    while True:
        os.write(descriptor, b"an error of another thread\\n")

for descriptor in (1, 2):
    threading.Thread(target=shout, args=[descriptor], daemon=True).start()
mine, chief = socket.socketpair()
other = Member(0, "here", 2, "worker 0")
watchdog = Watchdog(Member(1, "here", 1, "worker 1"), {other: Connection(mine)}, 2.0)
chief.close()
watchdog.serve()
"""

# Seconds. A watchdog that a busy machine holds up for as long ends the tests' own process.
SILENCE = 4.0


@contextlib.contextmanager
def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = Connection(socket.create_connection(server.getsockname()))
        accepted = Connection(server.accept()[0])
        with contextlib.closing(client), contextlib.closing(accepted):
            yield accepted, client


@contextlib.contextmanager
def serving():
    """A watchdog whose process 0 has said goodbye, a thread that serves it, and process 0's end."""
    with pair() as (chief, mine):
        me, other = Member(1, "here", 1, "worker 1"), Member(0, "here", 2, "worker 0")
        watchdog = Watchdog(me, {other: mine}, SILENCE)
        thread = threading.Thread(target=watchdog.serve, daemon=True)
        thread.start()
        chief.send(beat=True)
        chief.send(goodbye=True)
        time.sleep(0.5)
        yield watchdog, thread, chief


@pytest.mark.parametrize("how", ["dies", "falls silent"])
@pytest.mark.mostly_slow
def test_it_does_not_wait_for_a_process_0_that_is_gone(how):
    with serving() as (_, thread, chief):
        assert thread.is_alive()  # until process 0 has the goodbyes of all
        if how == "dies":
            chief.close()
        thread.join(TIME_LIMIT)
        assert not thread.is_alive()


def test_a_connection_may_break_while_another_process_is_started_to_speak(monkeypatch):
    with serving() as (watchdog, thread, chief):
        start = subprocess.Popen

        def start_late(*given, **named):
            chief.close()
            for one in threading.enumerate():
                if one.name == "watchdog":
                    one.join(TIME_LIMIT)
            assert all(stat.S_ISSOCK(os.fstat(one).st_mode) for one in named["pass_fds"])
            return start(*given, **named)

        monkeypatch.setattr(subprocess, "Popen", start_late)
        with watchdog.send_heartbeats_by_proxy():
            thread.join(TIME_LIMIT)
            assert not thread.is_alive()


def test_an_interrupt_while_a_process_is_started_to_speak_ends_that_process(monkeypatch):
    with serving() as (watchdog, _, _):
        start, started = subprocess.Popen, []

        def start_interrupted(*given, **named):
            started.append(start(*given, **named))
            raise KeyboardInterrupt

        monkeypatch.setattr(subprocess, "Popen", start_interrupted)
        with contextlib.suppress(KeyboardInterrupt), watchdog.send_heartbeats_by_proxy():
            pass
        assert started[0].wait(60) == 0


@pytest.mark.parametrize(
    "said", [{"lost": [1]}, {"lost": [0, "a", 1, "b"], "how": 3, "grace": 0}, {"lost": None}]
)
def test_a_process_0_that_talks_nonsense_is_gone(said):
    with serving() as (_, thread, chief):
        chief.send(**said)
        thread.join(TIME_LIMIT)
        assert not thread.is_alive()


@pytest.mark.slow
def test_its_words_are_the_last():
    ran = subprocess.run(
        [sys.executable, "-c", LOUD],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIME_LIMIT,
    )
    assert ran.returncode == LOST_PROCESS_EXIT_CODE
    last = ran.stdout.decode().rstrip("\n").splitlines()[-1]
    assert "lost worker 0" in last
    assert "newest checkpoint" in last
