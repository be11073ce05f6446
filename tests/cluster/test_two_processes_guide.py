"""The guide's program runs as it stands, started as the guide says, and ends as it says."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.cluster import reserved_ports
from mtf_gradsync import LOST_PROCESS_EXIT_CODE
from tests import documents
from tests.cluster.processes import ROOT, TIME_LIMIT

pytestmark = pytest.mark.cluster


def block(language):
    (block,) = documents.blocks("docs/clusters.md", language)
    return block.code


def group_members(group):
    """Processes of a process group that have not ended."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(of_group) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.fixture
def start(tmp_path):
    """Starts the guide's commands in a shell."""

    def shell():
        (tmp_path / "train.py").write_text(block("python"), encoding="utf-8")
        commands = block("sh").replace("127.0.0.1:2222", f"127.0.0.1:{ports[0]}")
        commands = commands.replace("127.0.0.1:2223", f"127.0.0.1:{ports[1]}")
        commands = commands.replace("wait", "echo exit $?; wait")
        path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "PYTHONPATH": str(ROOT), "TF_GRPC_REUSE_PORT": "1"}
        started.append(
            subprocess.Popen(
                ["bash", "-c", commands],
                cwd=tmp_path,
                env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[0]

    started = []
    with reserved_ports(2) as ports:
        try:
            yield shell
        finally:
            for one in started:
                if group_members(one.pid):
                    os.killpg(one.pid, signal.SIGKILL)
                one.wait()
                one.stdout.close()


def no_process_left(shell):
    end = time.monotonic() + 60
    while group_members(shell.pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not group_members(shell.pid)


def test_program_of_the_guide_runs_and_leaves_nothing(start):
    shell = start()
    printed = shell.communicate(timeout=TIME_LIMIT)[0]
    assert shell.returncode == 0, printed
    assert "exit 0" in printed
    loss = float(re.search(r"^loss (.*)$", printed, re.MULTILINE)[1])
    assert 0 < loss < 1, printed
    # The gradient goes once each way; so do the eight processors' shares of the loss.
    sent = int(re.search(r"ProcessTransfers\(tensors=\d+, bytes=(\d+)", printed)[1])
    assert 2 * 4 * 64 * 64 <= sent < 2 * 4 * 64 * 64 + 200, printed
    assert no_process_left(shell)


def test_a_dead_process_ends_the_program(processes, tmp_path, monkeypatch):
    code = block("python")
    for old, new in (
        ("DEVICES_EACH, STEPS = 4, 20", "DEVICES_EACH, STEPS = 4, 10**9"),
        ("value, _ =", "number == 5 and print('training', flush=True); value, _ ="),
    ):
        assert old in code
        code = code.replace(old, new)
    program = tmp_path / "train.py"
    program.write_text(code, encoding="utf-8")
    monkeypatch.setenv("TF_GRPC_REUSE_PORT", "1")
    with reserved_ports(2) as ports:
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        chief, worker = (processes.fork(program, addresses, task) for task in (0, 1))
        processes.wait_for(chief, "training")
        os.kill(worker.pid, signal.SIGKILL)
        assert chief.wait(TIME_LIMIT) == LOST_PROCESS_EXIT_CODE
    said = chief.output() + chief.errors()
    assert re.search(rf"lost worker 1 \(host .*, pid {worker.pid}\)", said), said
