"""Arguments of `start_processes`, and shares of a mesh that do not fit."""

import signal
import types

import pytest

from mtf_gradsync import xla
from mtf_gradsync.xla import distributed, gathering
from tests.forked import Forked

pytestmark = pytest.mark.xla


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coordinator": "host:1"}, "got coordinator without num_processes and process_id"),
        (
            {"num_processes": 2, "process_id": 0},
            "got num_processes, process_id without coordinator",
        ),
        (
            {"coordinator": "host:1", "num_processes": 2, "process_id": 2},
            "between 0 and 1 .* got 2",
        ),
        ({"coordinator": "host", "num_processes": 2, "process_id": 0}, "like 'host:1234'"),
        ({"coordinator": "host:x", "num_processes": 2, "process_id": 0}, "like 'host:1234'"),
        ({}, "finds no cluster"),
    ],
)
def test_wrong_arguments(monkeypatch, arguments, message):
    monkeypatch.setattr(distributed, "backends_are_initialized", lambda: False)
    with pytest.raises(ValueError, match=message):
        xla.start_processes(**arguments)


def test_jax_that_has_begun_already(monkeypatch):
    monkeypatch.setattr(distributed, "backends_are_initialized", lambda: True)
    with pytest.raises(xla.ProcessesError, match="jax has begun already"):
        xla.start_processes("127.0.0.1:1", 2, 0)


def test_slurm_is_found(monkeypatch):
    for name, value in {
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_NODELIST": "node[3-4]",
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    coordinator, *numbers, _ = distributed._job_of(None, None, None, 10.0)
    assert coordinator.startswith("node3:")
    assert numbers == [2, 1]


def device(process, me=0):
    client = types.SimpleNamespace(process_index=lambda: me)
    return types.SimpleNamespace(process_index=process, client=client, platform="cpu")


@pytest.fixture
def two_processes(monkeypatch):
    import jax

    monkeypatch.setattr(jax, "process_count", lambda platform=None: 2)


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize(("owners", "said"), [
    ([0, 0, 0, 1], "of 4 cores process 0 has 3, process 1 has 1"),
    ([1, 1], "of 2 cores process 0 has 0, process 1 has 2"),
])  # fmt: skip
def test_processes_with_unlike_shares(owners, said):
    with pytest.raises(xla.ProcessesError, match=f"{said}.*multiple of 2"):
        gathering.Cores([device(owner) for owner in owners])


@pytest.mark.slow
@pytest.mark.usefixtures("two_processes")
def test_shares_may_be_mixed_and_alone():
    mixed = gathering.Cores([device(owner) for owner in (0, 1, 1, 0)])
    assert (mixed.local, mixed.is_alone, mixed.is_first) == ([0, 3], False, True)
    assert gathering.Cores([device(1, me=1)] * 2).is_alone


_WITH_A_SIGNAL = """
import atexit, contextlib, os, signal, socket, sys
from mtf_gradsync import xla
from mtf_gradsync.runtimes._signals import Interruption
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
catch = Interruption if sys.argv[1:] else contextlib.nullcontext
try:
    with xla.start_processes(address, 1, 0, cpu_devices=1), catch():
        print("started", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("ignored", flush=True)
finally:
    atexit._run_exitfuncs()  # a forked program does not call them
"""


@pytest.mark.slow
@pytest.mark.parametrize(("caught", "status"), [([], -signal.SIGTERM), (["caught"], 143)])
def test_sigterm_ends_a_program_that_has_started_processes(caught, status):
    """A handler that jax sets would ignore it."""
    process = Forked(["-c", _WITH_A_SIGNAL, *caught])
    ended = process.wait(), process.output()
    assert ended == (status, "started\n"), process.errors()
