"""The guide's program runs as it stands, started as the guide says, and ends as it says."""

import os
import re
import signal

import pytest

from benchmarks.cluster import reserved_ports
from mtf_gradsync import LOST_PROCESS_EXIT_CODE
from tests import documents
from tests.runtimes.cluster.processes import ended

pytestmark = pytest.mark.cluster


def block(language):
    (block,) = documents.blocks("docs/clusters.md", language)
    return block.code


def commands(addresses):
    """The guide's commands, as a shell would start them at other addresses, the chief's last."""
    assignment, worker, chief, wait = block("sh").splitlines()
    assert assignment == "ADDRESSES=127.0.0.1:2222,127.0.0.1:2223"
    assert worker.endswith(" &")
    assert wait == "wait"
    words = [line.replace("$ADDRESSES", addresses).split() for line in (worker[:-2], chief)]
    assert all(program == "python" for program, *_ in words)
    return [arguments for _, *arguments in words]


@pytest.fixture
def addresses(monkeypatch):
    """Those of two processes, which stay reserved for them."""
    monkeypatch.setenv("TF_GRPC_REUSE_PORT", "1")
    with reserved_ports(2) as ports:
        yield ",".join(f"127.0.0.1:{port}" for port in ports)


@pytest.mark.slow
def test_program_of_the_guide_runs_and_leaves_nothing(processes, tmp_path, addresses):
    program = tmp_path / "train.py"
    program.write_text(block("python"), encoding="utf-8")
    worker, chief = (processes.fork(tmp_path / file, *rest) for file, *rest in commands(addresses))
    printed = processes.wait(chief)
    loss = float(re.search(r"^loss (.*)$", printed, re.MULTILINE)[1])
    assert 0 < loss < 1, printed
    # The gradient goes once each way; so do the eight processors' shares of the loss.
    sent = int(re.search(r"ProcessTransfers\(tensors=\d+, bytes=(\d+)", printed)[1])
    assert 2 * 4 * 64 * 64 <= sent < 2 * 4 * 64 * 64 + 200, printed
    # It ends with the chief, by itself and well.
    processes.wait(worker)
    assert ended([worker.pid, chief.pid])


@pytest.mark.slow
def test_a_dead_process_ends_the_program(processes, tmp_path, addresses):
    code = block("python")
    for old, new in (
        ("DEVICES_EACH, STEPS = 4, 20", "DEVICES_EACH, STEPS = 4, 10**9"),
        ("value, _ =", "number == 5 and print('training', flush=True); value, _ ="),
    ):
        assert old in code
        code = code.replace(old, new)
    program = tmp_path / "train.py"
    program.write_text(code, encoding="utf-8")
    chief, worker = (processes.fork(program, addresses, task) for task in (0, 1))
    processes.wait_for(chief, "training")
    os.kill(worker.pid, signal.SIGKILL)
    assert chief.wait() == LOST_PROCESS_EXIT_CODE
    said = chief.output() + chief.errors()
    assert re.search(rf"lost worker 1 \(host .*, pid {worker.pid}\)", said), said
