"""What processes say to each other, and what the proxy says for one of them."""

import os
import pathlib
import socket
import subprocess
import sys

from mtf_gradsync.processes import proxy
from mtf_gradsync.processes.messages import Connection


def test_the_proxy_says_what_a_connection_says():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Connection(ours).send(beat=True)
        assert theirs.recv(1000) == proxy.BEAT
        fd = ours.fileno()
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", proxy.__file__, str(os.getpid()), "0.1", str(fd)],
            pass_fds=[fd],
        )
        theirs.settimeout(30)
        said = b""
        try:
            while len(said) < 3 * len(proxy.BEAT):
                said += theirs.recv(1000)
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
