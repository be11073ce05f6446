"""An exported step runs on the devices of several processes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.cluster import free_ports
from mtf_gradsync.runtimes.xla.runner import Step
from tests import networks
from tests.forked import TIME_LIMIT
from tests.runtimes.xla.export import models

pytestmark = pytest.mark.xla


@pytest.mark.slow
def test_two_processes_do_what_one_does(exported, tmp_path):
    address = f"127.0.0.1:{free_ports(1)[0]}"
    outputs = ["--fetches", tmp_path / "fetches.npz", "--save", tmp_path / "saved"]
    members = ["--coordinator", address, "--num_processes", 2, "--process_id"]
    running = [
        subprocess.Popen(
            models.command(exported.step, "--inputs", exported.batches, *outputs, *members, i),
            env=models.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=TIME_LIMIT)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], said
    assert "4 cpu devices (cpu), 2 of them here" in said[0]
    with np.load(tmp_path / "fetches.npz") as fetches:
        # Between processes sums go another way than inside one.
        np.testing.assert_allclose(fetches["loss"], exported.fetches["loss"], rtol=1e-5)
        for name in ("noise", "seen"):
            models.assert_same_bits({"": fetches[name]}, {"": exported.fetches[name]})
    found = Step.load(str(tmp_path / "saved")).variables()
    assert found.keys() == exported.variables.keys() - {"global_step"}
    for name, value in found.items():
        # The same for the updates; a rounding to bfloat16 may fall to the other side.
        rtol = 2**-7 if value.dtype.kind == "V" else 1e-4
        expected = exported.variables[name].astype(np.float64)
        np.testing.assert_allclose(value.astype(np.float64), expected, rtol=rtol, atol=1e-5)


@pytest.mark.slow
def test_a_run_that_has_joined_others_ends_by_a_signal(exported):
    """jax catches SIGTERM, and does nothing with it."""
    members = ["--coordinator", f"127.0.0.1:{free_ports(1)[0]}", "--num_processes", 1]
    members += ["--process_id", 0, "--cpu_devices", 4]
    run = subprocess.Popen(
        models.command(exported.step, *members, "--random-inputs", "--steps", 10**7),
        env=models.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with run:
        try:
            assert run.stdout is not None
            said = run.stdout.readline()
            run.send_signal(signal.SIGTERM)
            assert run.wait(TIME_LIMIT) == -signal.SIGTERM, said
        finally:
            run.kill()


_STARTED = """
import os, sys
import numpy as np
from mtf_gradsync import xla
with xla.start_processes(sys.argv[1], 2, int(os.fork() == 0), cpu_devices=1):
    from jax.experimental import multihost_utils
    print(multihost_utils.process_allgather(np.arange(3)).sum(), flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["run.py", "start_processes"])
def test_where_all_are_on_one_machine_no_other_can_connect(way, exported):
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with networks.machine() as machine, contextlib.ExitStack() as stack:
        running = []
        for i in range(2 if way == "run.py" else 1):
            command = [sys.executable, "-c", _STARTED, address]  # imports for two, and forks
            if way == "run.py":
                members = ["--coordinator", address, "--num_processes", 2, "--process_id", i]
                endless = ["--random-inputs", "--steps", 10**7]
                command = models.command(exported.step, *members, *endless)
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = subprocess.Popen(
                machine.command(*command), env=models.environment(), text=True, **pipes
            )
            running.append(stack.enter_context(process))
            stack.callback(process.kill)
        assert running[0].stdout.readline()
        if way == "run.py":
            assert running[0].stdout.readline().startswith("step 1 ")
        found = machine.listening()
        # jax's coordinator, and gloo of two processes.
        assert len(found) == 3
        assert {address.strip("[]").rpartition(":")[2] for address in found.values()} == {
            "127.0.0.1"
        }
        assert machine.reached_by_the_neighbour(list(found)) == []
