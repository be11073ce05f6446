"""Strategies on a mesh over two tasks that talk over the network."""

import socket

import numpy as np
import pytest

from mtf_gradsync import reduce, session_config
from mtf_gradsync._private.libraries import mtf, tf
from tests.reduce import on_mesh

DEVICES = [f"/job:worker/task:{i // 4}/device:CPU:{i % 4}" for i in range(8)]


def two_servers():
    """Two servers on ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(2)]
    for s in sockets:
        s.bind(("localhost", 0))
    cluster = {"worker": [f"localhost:{s.getsockname()[1]}" for s in sockets]}
    for s in sockets:
        s.close()
    config = session_config(num_cpu_devices=4)
    return [
        tf.train.Server(cluster, job_name="worker", task_index=i, config=config) for i in range(2)
    ]


@pytest.fixture(scope="module")
def target():
    """Two servers in this process: devices, placement and messages are those of two machines."""
    for attempt in range(5):
        try:
            return two_servers()[0].target
        except tf.errors.UnknownError:  # another process took a port in between
            if attempt == 4:
                raise
    return None


@pytest.mark.parametrize("mesh_shape", ["all:8", "rows:4;cols:2"])
@pytest.mark.parametrize(
    ("strategy", "unit"),
    [
        (reduce.HierarchicalAllReduce(("add_n/add_n", 2)), 2.0**-24),
        (reduce.HierarchicalAllReduce("ring/ring", num_packs=2), 2.0**-24),
        (reduce.ReductionToOneDevice(DEVICES[5]), 2.0**-24),
        (reduce.CompressedAllReduce(reduce.HierarchicalAllReduce()), 2.0**-8),
    ],
)
def test_sums(target, strategy, unit, mesh_shape):
    data = [np.random.RandomState(i).randn(8, *s).astype("f") for i, s in enumerate([(), (33, 5)])]

    def make(impl, values):
        each = [on_mesh.sums(strategy, axes) for axes in on_mesh.subsets(mesh_shape)]
        return [y for sums in each for y in sums(impl, values)]

    first, second = on_mesh.run(
        "placement", mesh_shape, data, make, runs=2, devices=DEVICES, target=target
    )
    assert [x.tobytes() for x in first] == [x.tobytes() for x in second]
    out = iter(first)
    for axes in on_mesh.subsets(mesh_shape):
        groups = mtf.processor_groups(mtf.convert_to_shape(mesh_shape), list(axes))
        for x in data:
            y = next(out)
            size = on_mesh.expected(mesh_shape, np.abs(x), groups)
            # 8 roundings of float32, or one a value and level of bfloat16.
            limit = 8 * 2.0**-24 + (3.02 * unit if unit > 2.0**-24 else 0)
            assert (np.abs(y - on_mesh.expected(mesh_shape, x, groups)) <= limit * size).all()
            for group in groups:
                assert len({y[p].tobytes() for p in group}) == 1


def test_overflow_is_warned_of_once_for_both_tasks(target, capfd):
    x = np.full([8, 3], 3e4, "f")

    strategy = reduce.CompressedAllReduce(reduce.HierarchicalAllReduce(), "float16")
    sums = on_mesh.sums(strategy)
    (out,) = on_mesh.run("placement", "all:8", [x], sums, devices=DEVICES, target=target)
    assert np.isinf(out).all()
    assert capfd.readouterr().err.count("overflow: 1 of 1 sums") == 1
