"""AllReduce, ReductionToOneDevice and RingAllReduce: what they build, and what they refuse."""

import collections

import numpy as np
import pytest

from mtf_gradsync import reduce, simd
from mtf_gradsync._private.libraries import tf
from tests.reduce import on_mesh


def add_ns(graph):
    """(elements, device) of each AddN."""
    return [
        (op.outputs[0].shape.num_elements(), op.device)
        for op in graph.get_operations()
        if op.type == "AddN"
    ]


def built(strategy, shapes, mesh_shape="all:8", dtype=tf.float32):
    with on_mesh.graph_of(mesh_shape, shapes, dtype) as (impl, values, graph):
        groups = reduce.ProcessorGroups.along(impl, range(impl.shape.ndims))
        strategy.all_reduce(impl, values, groups)
        return graph


@pytest.mark.parametrize(
    ("strategy", "elements"),
    [
        (reduce.AllReduce(), [31]),
        (reduce.AllReduce(num_packs=4), [7, 7, 7, 10]),
        (reduce.AllReduce("add_n", 0), [1, 5, 5, 20]),
        (reduce.AllReduce("add_n", 0, 19, 2), [1, 5, 5, 20]),
        (reduce.AllReduce("add_n", 0, 20, 2), [5, 6, 20]),
        (reduce.AllReduce("add_n", 0, 20, 10), [11, 20]),
        (reduce.AllReduce("add_n", 0, 20, 0), [1, 5, 5, 20]),
    ],
)
def test_packs(strategy, elements):
    graph = built(strategy, [(4, 5), (), (5,), (5,)])
    assert sorted(n for n, _ in add_ns(graph)) == elements


def test_packs_take_turns_on_the_devices():
    devices = [device for _, device in add_ns(built(reduce.AllReduce(num_packs=16), [(64,)]))]
    assert sorted(collections.Counter(devices).values()) == [2] * 8


@pytest.mark.parametrize(
    ("shape", "strategy", "splits"),
    [
        # Packs of two, and tensors in two halves: copied for all devices or for each.
        ((2 << 16,), reduce.AllReduce(), 1),
        ((64,), reduce.AllReduce(), 8),
        ((2 << 16,), reduce.AllReduce(num_packs=4), 2),
        ((64,), reduce.AllReduce(num_packs=4), 16),
    ],
)
def test_large_sums_are_copied_once_for_the_devices_of_one_memory(shape, strategy, splits):
    graph = built(strategy, [shape, shape])
    after = [op.type for op in graph.get_operations()]
    if strategy.packer.num_packs == 1:
        assert after.count("Unpack") == splits
    else:
        assert after.count("ConcatV2") == splits


def test_large_sums_are_right_and_not_shared_between_memories():
    data = [np.random.RandomState(i).randn(4, 40_000).astype("f") for i in range(2)]
    devices = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(4)]
    # Strings of another process would not run here: only the graph is looked at.
    elsewhere = [*devices[:2], "/job:worker/task:1/device:CPU:0", "/job:worker/task:1/device:CPU:1"]

    sums = on_mesh.sums(reduce.AllReduce())
    for x, out in zip(data, on_mesh.run("placement", "all:4", data, sums, devices=devices)):
        # Three additions of numbers of up to about 5, each rounded.
        np.testing.assert_allclose(out, [x.sum(0, dtype=float)] * 4, atol=3 * 20 * 2.0**-24)
    with on_mesh.graph_of("all:4", [(40_000,)] * 2) as (impl, values, graph):
        impl.devices[:] = elsewhere
        sums(impl, values)
        unpacked = [op.device for op in graph.get_operations() if op.type == "Unpack"]
    assert len(unpacked) == 2
    assert len({"worker" in device for device in unpacked}) == 2


def test_dtypes_are_not_mixed_in_a_pack():
    with on_mesh.graph_of("all:8", [(3,), (4,)]) as (impl, values, graph):
        values += [impl.LaidOutTensor([tf.placeholder(tf.float64, [2])] * 8)]
        on_mesh.sums(reduce.AllReduce())(impl, values)
        assert sorted(n for n, _ in add_ns(graph)) == [2, 7]


def test_ring_is_mesh_tf_s_to_the_bit():
    x = np.random.RandomState(0).randn(8, 8, 160).astype("f")

    def make(impl, values):
        groups = reduce.ProcessorGroups.along(impl, [1])
        own = [impl.allreduce(v, [1], "SUM") for v in values]
        return own + reduce.RingAllReduce().all_reduce(impl, values, groups)

    own, ours = on_mesh.run("placement", "rows:2;cols:4", [x], make)
    assert own.tobytes() == ours.tobytes()
    assert not [
        op for op in built(reduce.RingAllReduce(), [(1024,)]).get_operations() if op.type == "AddN"
    ]


@pytest.mark.parametrize("device", ["/device:CPU:3", "cpu:3", "/cpu:3"])
def test_one_device_adds_up_for_all_groups(device):
    strategy = reduce.ReductionToOneDevice(device)
    with on_mesh.graph_of("rows:4;cols:2", [(3,), (4,)]) as (impl, values, graph):
        on_mesh.sums(strategy)(impl, values)
        assert {device for _, device in add_ns(graph)} == {"/device:CPU:3"}
        assert len(add_ns(graph)) == 4


def test_without_a_device_all_take_turns():
    graph = built(reduce.ReductionToOneDevice(), [(3,)] * 16)
    devices = collections.Counter(device for _, device in add_ns(graph))
    assert sorted(devices.values()) == [2] * 8


def test_accumulation_fn():
    def from_the_end(tensors):
        total = tensors[-1]
        for x in tensors[-2::-1]:
            total += x
        return total

    # In this order alone, in float32, the ones are not lost.
    x = np.array([2.0**25, 1, 1, 1, 1, 1, 1, 2], "f")

    sums = on_mesh.sums(reduce.ReductionToOneDevice(accumulation_fn=from_the_end))
    (out,) = on_mesh.run("placement", "all:8", [x], sums)
    assert (out == 2.0**25 + 8).all()


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (lambda: reduce.ReductionToOneDevice("/device:CPU:0"), "ReductionToOneDevice"),
        (lambda: reduce.AllReduce("add_n"), "algorithm='add_n'"),
        (lambda: reduce.AllReduce("ring"), "algorithm='ring'"),
        (lambda: reduce.AllReduce(), None),
        (lambda: reduce.RingAllReduce(), None),
    ],
)
def test_simd_falls_back_with_one_warning(strategy, said, caplog):
    x = np.ones([4, 3], "f")

    def make(impl, values):
        return [y for _ in range(2) for y in on_mesh.sums(strategy())(impl, values)]

    out = on_mesh.run("simd", "all:4", [x], make)
    assert (np.stack(out) == 4).all()
    warnings = [r.getMessage() for r in caplog.records if r.name == "mtf_gradsync"]
    assert len(warnings) == (said is not None)
    assert all(said in w for w in warnings)


def test_packs_are_collectives_on_simd():
    with tf.Graph().as_default() as graph:
        with simd.tpu_program("all:8", "") as program:
            impl = program.mesh_impl
            values = [impl.LaidOutTensor([tf.ones(shape)]) for shape in [(4, 5), (), (5,), (5,)]]
            on_mesh.sums(reduce.AllReduce(num_packs=4))(impl, values)
        sums = [op for op in graph.get_operations() if op.type == "CrossReplicaSum"]
    assert [op.inputs[0].shape.num_elements() for op in sums] == [7, 7, 7, 10]
