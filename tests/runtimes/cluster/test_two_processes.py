"""What crosses between two processes: as counted, as sent, and as it should be."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import cluster, models, two_processes
from tests.runtimes.cluster import two_processes_program as program
from tests.runtimes.cluster.processes import ROOT, ended

pytestmark = pytest.mark.cluster
SIZES = [4 * math.prod(shape) for shape in program.SHAPES]


@pytest.fixture
def found(of_two_processes):
    """What the program writes."""
    return of_two_processes


@pytest.mark.slow
@pytest.mark.parametrize(("order", "strategy"), program.SUMS)
def test_edges_are_what_tensorflow_sends(found, order, strategy):
    one = found["sums"][f"{order}: {strategy}"]
    if order == "mixed" and strategy in program.WITH_GRAPPLER:
        assert one["with Grappler"]["bytes"] == one["real"]["bytes"]
    if strategy == "collective":
        # It sends by itself; what is left are the signals that make everyone wait for everyone.
        assert one["real"]["bytes"] == 0
        assert one["counted"]["bytes"] is None
        assert one["counted"]["signals"] == one["real"]["signals"]
        return
    assert one["counted"] == one["real"]
    assert one["real"]["bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("order", ["by process", "mixed"])
@pytest.mark.parametrize("strategy", program.TWO_LEVELS)
def test_two_levels_send_each_tensor_once_each_way(found, order, strategy):
    """Wherever the processes' devices stand on the mesh."""
    one_way = sum(SIZES) // (2 if strategy.endswith("bfloat16") else 1)
    assert found["sums"][f"{order}: {strategy}"]["real"]["bytes"] == 2 * one_way


@pytest.mark.slow
def test_one_device_and_the_ring_send_more(found):
    # All slices of the other process go to one device, and the sum comes back.
    on_one = found["sums"][f"by process: {program.ONE_DEVICE}"]["real"]["bytes"]
    assert on_one == (two_processes.EACH + 1) * sum(SIZES)
    # In eight parts that begin at different places: 2 of 8 cross twice, 6 of 8 four times.
    assert found["sums"]["by process: flat ring"]["real"]["bytes"] == sum(
        3.5 * size if size == 4 * 32 * 64 else 2 * size for size in SIZES
    )
    # Every link of the ring is between processes, and is used once each way.
    assert found["sums"]["mixed: flat ring"]["real"]["bytes"] == 14 * sum(SIZES)


@pytest.mark.slow
def test_table_has_all_figures(found):
    rows = {row["strategy"]: row for row in found["table"]["rows"]}
    assert set(rows) == {*program.IN_TABLE, models.BARE, two_processes.WHOLE_MESH}
    for name, row in rows.items():
        assert row["step ms"]["median"] > 0
        if name in program.IN_TABLE and name != "collective":
            assert row["sum ms"]["median"] > 0
            # The sockets carry the tensors and what describes them.
            assert row["bytes on sockets"] > row["bytes on edges"] > 0
    if "bytes on sockets" in rows["collective"]:
        # TensorFlow's ring: in 14 turns an eighth of the tensor goes over each of two links.
        gradients = rows["two levels"]["bytes on edges"] / 2
        assert rows["collective"]["bytes on sockets"] > 3.5 * gradients
    assert all(target["met"] for target in found["table"]["targets"])


# A process of the cluster is ready sooner where it serves nothing.
STARTER = (
    # A shell's background job, such as this suite may be, ignores it.
    "import signal, sys, time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from benchmarks import cluster as module\n"
    "module.SERVER = sys.argv[2]\n"
    "with module.LocalCluster(int(sys.argv[1]), 1) as cluster:\n"
    "    print(*cluster.pids, flush=True); time.sleep(3600)"
)


@pytest.mark.slow
def test_no_process_is_left_behind():
    nothing = "tests.runtimes.cluster.serves_nothing"
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", STARTER, *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in (("1", cluster.SERVER), ("1", nothing), ("2", nothing))
    ]
    pids = [[int(pid) for pid in starter.stdout.readline().split()] for starter in starters]
    try:
        # The starter is killed, or asked to end, or a process of the cluster is killed.
        starters[0].send_signal(signal.SIGKILL)
        starters[1].send_signal(signal.SIGINT)
        os.kill(pids[2][1], signal.SIGKILL)
        errors = [starter.communicate(timeout=600)[1] for starter in starters]
        assert ended([pid for group in pids for pid in group])
    finally:
        for starter in starters:
            starter.kill()
    assert [starter.returncode for starter in starters] == [-signal.SIGKILL, -signal.SIGINT, 1]
    assert "ended with -9" in errors[2]


def test_reserved_ports_stay_reserved():
    with cluster.reserved_ports(3) as ports:
        assert len(set(ports)) == 3
        for port in ports:
            with pytest.raises(OSError, match="in use"), cluster.socket.socket() as other:
                other.bind(("127.0.0.1", port))


def test_bytes_to_peers_counts_this_side_s_connections_only():
    with cluster.socket.socket() as server, cluster.socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client.connect(("127.0.0.1", port))
        with server.accept()[0] as other:
            client.sendall(b"x" * 1000)
            other.sendall(b"y" * 10)
            assert len(other.recv(1000, cluster.socket.MSG_WAITALL)) == 1000
            assert len(client.recv(10, cluster.socket.MSG_WAITALL)) == 10
            end = time.monotonic() + 60
            # What was sent counts when its arrival is known; the first byte stands for the start.
            while cluster.bytes_to_peers({port}) < 1010 and time.monotonic() < end:
                time.sleep(0.01)
            before = len(os.listdir("/proc/self/fd"))
            assert 1010 <= cluster.bytes_to_peers({port}) <= 1012
            assert cluster.bytes_to_peers({port + 1}) == 0
            assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
def test_collectives_whose_members_come_in_opposite_orders_are_not_mixed_up(found):
    """Each is found by its keys, which all members have, and each device waits with the second."""
    crossed = found["crossed"]
    (keys,) = {json.dumps(keys) for keys in crossed["keys"].values()}
    assert len(crossed["keys"]) == 8
    (size, group, first), (_, other_group, second) = json.loads(keys)
    assert size == 8
    assert group == other_group
    assert first != second
    for sums in crossed["sums"]:
        assert sums == [[[8.0] * 3] * 8, [[16.0] * 5] * 8]
