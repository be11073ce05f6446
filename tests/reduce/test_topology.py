"""What is found out about hand-made meshes."""

import pytest

from mtf_gradsync.mesh.devices import memories
from mtf_gradsync.reduce import choice as topology
from tests.mesh.devices import cpus, gpu, placement


def of_gpus(attributes, devices=None):
    devices = [a.name for a in attributes] if devices is None else devices
    return topology.topology_of(placement(devices), attributes)


def test_cpus_of_one_process():
    found = topology.topology_of(placement(cpus(8)))
    assert found.size == 8
    assert set(found.kinds) == {"CPU"}
    assert len(set(found.processes)) == 1
    assert len(set(found.chips)) == 8
    assert found.describe() == "8 CPU devices of one process"


def test_processes():
    found = topology.topology_of(placement(cpus(4, 0) + cpus(4, 1)))
    assert [found.processes.index(p) for p in found.processes] == [0] * 4 + [4] * 4
    assert "2 processes" in found.describe()


def test_names_of_one_process_are_one():
    names = ["", "cpu:1", "/device:CPU:2", "/job:localhost/replica:0/task:0/device:CPU:3"]
    found = topology.topology_of(placement(names))
    assert len(set(found.processes)) == 1
    assert set(found.kinds) == {"CPU"}
    assert memories(names) == [[0, 1, 2, 3]]


def test_memories():
    devices = [*cpus(2), "/device:GPU:0", "/device:GPU:1", *cpus(2, 1), "gpu:1"]
    assert memories(devices) == [[0, 1], [2], [3, 6], [4, 5]]


@pytest.mark.parametrize(
    ("links", "linked"),
    [
        ([(1, 2), (0, 2), (0, 1)], True),
        # In a row: the ends reach each other over the middle.
        ([(1,), (0, 2), (1,)], True),
        ([(), (), ()], False),
        ([(1,), (0,), ()], False),
        # Links to a GPU that is not on the mesh join nothing.
        ([(7,), (7,), (7,)], False),
    ],
)
def test_links(links, linked):
    found = of_gpus([gpu(i, some) for i, some in enumerate(links)])
    assert found.linked is linked
    assert found.models == ["Tesla V100"] * 3
    assert "3 GPU devices (Tesla V100) of one process, " in found.describe()


def test_links_are_looked_at_in_each_process():
    here = [gpu(i, [1 - i], task=0) for i in range(2)]
    assert of_gpus(here + [gpu(i, [1 - i], task=1) for i in range(2)]).linked is True
    assert of_gpus(here + [gpu(i, task=1) for i in range(2)]).linked is False


def test_gpus_that_nobody_describes():
    assert of_gpus([], ["/device:GPU:0", "/device:GPU:1"]).linked is None
    assert of_gpus([gpu(0, [1])], ["/device:GPU:0", "/device:GPU:1"]).linked is None
    # Those of other processes are not asked for, and there are none here.
    for task in ("", "/job:worker/task:1"):
        found = topology.topology_of(placement([f"{task}/device:GPU:0"]))
        assert found.linked is None


def test_parts_of_one_gpu_are_one_chip():
    assert len(set(of_gpus([gpu(0, [1]), gpu(1, [0])]).chips)) == 2
    assert len(set(of_gpus([gpu(0, [1], bus="a"), gpu(1, [0], bus="a")]).chips)) == 1


def test_strings_that_name_no_device():
    found = topology.topology_of(placement(["nonsense", "/device:FPGA:0"]))
    assert list(found.kinds) == ["unknown", "FPGA"]
