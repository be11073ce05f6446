"""The helper that starts processes for the tests here."""

import os
import signal
import subprocess
import sys

import pytest

from tests.runtimes.cluster import processes as module
from tests.runtimes.cluster.processes import ended

IDLE = "tests.runtimes.cluster.idle"


def pids(output):
    return [int(word) for word in output.split("started ")[1].split()[:2]]


def begin(processes, *words):
    """Starts the idle program."""
    return processes.fork("-m", IDLE, *words)


def test_a_failing_test_leaves_no_process():
    def fails():
        with module.Processes() as processes:
            started.append(begin(processes))
            processes.wait_for(started[0], "started")
            raise KeyError

    started = []
    with pytest.raises(KeyError):
        fails()
    assert ended(pids(started[0].output()))


def test_a_killed_parent_leaves_no_program():
    code = (
        # The idle program needs nothing to be imported before it is forked.
        "from tests import forked; forked._FORK_SERVER.set_forkserver_preload([])\n"
        "from tests.runtimes.cluster.processes import Processes\n"
        f"processes = Processes(); process = processes.fork('-m', {IDLE!r})\n"
        "processes.wait_for(process, 'started'); print(process.output(), flush=True)\n"
        "processes.wait(process)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=module.ROOT, stdout=subprocess.PIPE, text=True
    )
    program, grandchild = pids(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    try:
        assert ended([program])
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_waiting_ends_when_another_program_fails(processes):
    waiting = begin(processes)
    begin(processes, "fail")
    with pytest.raises(RuntimeError, match="as asked"):
        processes.wait(waiting)


def test_waiting_ends_when_the_time_is_up():
    with module.Processes(time_limit=0) as processes:
        process = begin(processes)
        with pytest.raises(TimeoutError, match="idle"):
            processes.wait(process)


def test_cluster_specs_have_ports_of_their_own():
    spec = module.cluster_spec({"ps": 1, "worker": 3})
    assert [len(spec["ps"]), len(spec["worker"])] == [1, 3]
    assert len({*spec["ps"], *spec["worker"]}) == 4
