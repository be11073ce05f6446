"""What a process does whose process 0 ends."""

import contextlib
import os
import socket
import stat
import subprocess
import threading
import time

import pytest

from mtf_gradsync.processes.members import Member
from mtf_gradsync.processes.messages import Connection
from mtf_gradsync.processes.watchdog import Watchdog


@contextlib.contextmanager
def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        yield Connection(server.accept()[0]), Connection(client)


@pytest.mark.parametrize("how", ["dies", "falls silent"])
def test_it_does_not_wait_for_a_process_0_that_is_gone(how):
    with pair() as (chief, mine):
        me, other = Member(1, "here", 1, "worker 1"), Member(0, "here", 2, "worker 0")
        watchdog = Watchdog(me, {other: mine}, 2.0)
        serving = threading.Thread(target=watchdog.serve, daemon=True)
        serving.start()
        chief.send(beat=True)
        chief.send(goodbye=True)
        time.sleep(0.5)
        assert serving.is_alive()  # until process 0 has the goodbyes of all
        if how == "dies":
            chief.close()
        serving.join(10)
        assert not serving.is_alive()


def test_a_connection_may_break_while_another_process_is_started_to_speak(monkeypatch):
    with pair() as (chief, mine):
        me, other = Member(1, "here", 1, "worker 1"), Member(0, "here", 2, "worker 0")
        watchdog = Watchdog(me, {other: mine}, 5.0)
        serving = threading.Thread(target=watchdog.serve, daemon=True)
        serving.start()
        chief.send(goodbye=True)
        time.sleep(0.5)
        start = subprocess.Popen

        def start_late(*given, **named):
            chief.close()
            for thread in threading.enumerate():
                if thread.name == "watchdog":
                    thread.join(10)
            assert all(stat.S_ISSOCK(os.fstat(one).st_mode) for one in named["pass_fds"])
            return start(*given, **named)

        monkeypatch.setattr(subprocess, "Popen", start_late)
        with watchdog.spoken_for():
            serving.join(10)
            assert not serving.is_alive()
