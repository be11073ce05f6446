"""reduce, batch_reduce and broadcast: sums and means where they are wanted."""

import numpy as np
import pytest
import tensorflow as tf2

from mtf_gradsync import reduce
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness
from tests.reduce import on_mesh
from tests.reduce.every_strategy import SHAPES, STRATEGIES, arrays, check

SUM, MEAN = tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN
MESH = "rows:4;cols:2"
NOT_COLLECTIVE = [name for name in STRATEGIES if not name.startswith("collective")]


@pytest.mark.parametrize(
    ("mesh_kind", "strategy"),
    harness.pairs(["placement", "simd"], NOT_COLLECTIVE),
    indirect=["mesh_kind"],
)
@pytest.mark.mostly_slow(every=5)
def test_means_over_every_set_of_axes(mesh_kind, strategy):
    """Groups of two, four and eight."""
    mesh_shape, data = on_mesh.MESHES["2x2x2"], arrays()[2:5]
    subsets = on_mesh.subsets(mesh_shape)

    def make(impl, values):
        results = []
        for axes in subsets:
            groups = reduce.ProcessorGroups.along(impl, axes)
            pairs = [(value, value) for value in values]
            results += STRATEGIES[strategy]().batch_reduce(impl, MEAN, pairs, groups)
        return results

    out = iter(on_mesh.run(mesh_kind, mesh_shape, data, make))
    for axes in subsets:
        groups = mtf.processor_groups(mtf.convert_to_shape(mesh_shape), list(axes))
        # Groups are powers of two: neither the division nor this rounds anything.
        some = [next(out) * np.float32(len(groups[0])) for _ in data]
        check(mesh_kind, mesh_shape, data, some, groups, 2.0**-24)


def test_a_mean_divides_once_and_after_the_sum():
    with on_mesh.graph_of(MESH, [(3,)]) as (impl, values, graph):
        strategy = reduce.ReductionToOneDevice()
        strategy.reduce(impl, MEAN, values[0], values[0])
        (division,) = [op for op in graph.get_operations() if op.type == "RealDiv"]
        assert division.inputs[0].op.type == "AddN"
        assert division.device == division.inputs[0].op.device


def test_a_mean_of_three_is_rounded_once_more_than_the_sum():
    x = np.array([0.1, 0.7, 1.3], "f")

    def make(impl, values):
        return [reduce.FusedAllReduce().reduce(impl, MEAN, values[0], values[0])]

    (out,) = on_mesh.run("placement", "all:3", [x], make)
    assert (out == (x[0] + x[1] + x[2]) / np.float32(3)).all()


@pytest.mark.parametrize("strategy", NOT_COLLECTIVE)
def test_devices_as_destinations(strategy):
    mine = STRATEGIES[strategy]()
    data = arrays()
    with on_mesh.graph_of("all:4", SHAPES) as (impl, values, _):
        with tf.device("/device:CPU:1"):
            variable = tf.get_variable("v", [])
        everywhere = ["/device:CPU:3", "cpu:0", "/device:CPU:4"]
        one = mine.reduce(impl, SUM, values[2], "/device:CPU:2")
        several = mine.batch_reduce(
            impl, MEAN, ((values[3], everywhere), (values[4], variable), (values[5], values[2]))
        )
        assert list(one) == ["/device:CPU:2"]
        assert [list(x) for x in several[:2]] == [everywhere, [variable.device]]
        for copies in (one, *several[:2]):
            for device, x in copies.items():
                assert x.device == tf.DeviceSpec.from_string(device).to_string()
        config = tf.ConfigProto(device_count={"CPU": 5})
        feed = {x: a[p] for v, a in zip(values, data) for p, x in enumerate(v.tensor_list)}
        with tf.Session(config=config) as session:
            got, means = session.run([one, several[0]], feed)
    np.testing.assert_allclose(
        got["/device:CPU:2"], data[2][:4].sum(0, dtype=float), atol=4 * 2.0**-24 * 30
    )
    assert len({x.tobytes() for x in means.values()}) == 1
    np.testing.assert_allclose(
        means["cpu:0"], data[3][:4].mean(0, dtype=float), atol=4 * 2.0**-24 * 10
    )


def test_both_enums_of_tensorflow():
    with on_mesh.graph_of("all:2", [(3,)]) as (impl, values, graph):
        strategy = reduce.FusedAllReduce()
        strategy.reduce(impl, tf2.VariableAggregation.MEAN, values[0], values[0])
        assert [op for op in graph.get_operations() if op.type == "RealDiv"]
        for bad in (tf.VariableAggregation.NONE, "mean", None):
            with pytest.raises(ValueError, match=r"aggregation.*SUM"):
                strategy.reduce(impl, bad, values[0], values[0])


def test_bad_arguments_are_refused_before_anything_is_built():
    strategy = reduce.FusedAllReduce()
    with on_mesh.graph_of("all:2", [(3,)]) as (impl, values, graph):
        (value,) = values
        integer = impl.LaidOutTensor([tf.placeholder(tf.int32, [3])] * 2)
        short = impl.LaidOutTensor(value.tensor_list[:1])
        sparse = impl.LaidOutTensor(
            [tf.IndexedSlices(tf.ones([1, 3]), tf.zeros([1], tf.int32))] * 2
        )
        unknown = impl.LaidOutTensor([tf.placeholder(tf.float32)] * 2)
        mtf_tensor = mtf.zeros(mtf.Mesh(mtf.Graph(), "m"), mtf.Shape([]))
        two = reduce.ProcessorGroups([[0], [1]])
        device = "/device:CPU:0"
        before = len(graph.get_operations())
        for arguments, message in [
            ((SUM, value, []), "must not be empty"),
            ((SUM, value, ""), "must not be empty"),
            ((SUM, value, None), "destinations must be"),
            ((SUM, value, 3), "destinations must be"),
            ((SUM, value, [device, 3]), "destinations must be"),
            ((SUM, value, "first"), "destinations must be a string"),
            ((SUM, value, short), "one slice for each of the 2 processors"),
            ((SUM, short, device), "one slice for each of the 2 processors"),
            ((SUM, value.tensor_list[0], device), "LaidOutTensor"),
            ((SUM, [value], device), "LaidOutTensor"),
            ((SUM, mtf_tensor, device), "lowering.tensors"),
            ((SUM, sparse, device), "dense"),
            ((SUM, unknown, device), "unknown"),
            ((MEAN, integer, device), "mean of int32"),
            ((SUM, value, device, two), "several groups"),
        ]:
            with pytest.raises(ValueError, match=message):
                strategy.reduce(impl, *arguments)
        for pairs in (None, value, (value, device), [[value, device]], [(value,)], {}):
            with pytest.raises(ValueError, match="value_destination_pairs"):
                strategy.batch_reduce(impl, SUM, pairs)
        for tensor in (3.0, value, sparse.tensor_list[0]):
            with pytest.raises(ValueError, match="tensor must be"):
                strategy.broadcast(impl, tensor, device)
        with pytest.raises(ValueError, match="empty"):
            strategy.broadcast(impl, value.tensor_list[0], [])
        assert len(graph.get_operations()) == before
        assert strategy.batch_reduce(impl, SUM, []) == []


def test_a_simd_mesh_has_no_devices():
    def make(impl, values):
        strategy = reduce.FusedAllReduce()
        with pytest.raises(ValueError, match=r"SIMD.*CPU:0"):
            strategy.reduce(impl, SUM, values[0], "/device:CPU:0")
        return [
            strategy.reduce(impl, MEAN, values[0], values[0]),
            strategy.broadcast(impl, tf.constant([7.0]), values[0]),
        ]

    mean, copy = on_mesh.run("simd", "all:4", [np.arange(4, dtype="f")], make)
    assert (mean == 1.5).all()
    assert (copy == 7).all()


def test_broadcast():
    x = np.random.RandomState(0).randn(3, 2).astype("f")

    def make(impl, values):
        tensor = values[0].tensor_list[5]
        strategy = reduce.FusedAllReduce()
        out = strategy.broadcast(impl, tensor, values[0])
        assert [y.device for y in out.tensor_list] == impl.devices
        some = strategy.broadcast(impl, tensor, ["/device:CPU:6", "cpu:1"])
        assert [y.device for y in some.values()] == ["/device:CPU:6", "/device:CPU:1"]
        assert list(some) == ["/device:CPU:6", "cpu:1"]
        return [out, impl.LaidOutTensor(list(some.values()))]

    data = np.stack([x + p for p in range(8)])
    for out in on_mesh.run("placement", "all:8", [data], make):
        assert (out == data[5]).all()


def test_broadcast_sends_once_to_each_process():
    devices = [f"/job:worker/task:{i // 4}/device:CPU:{i % 4}" for i in range(8)]
    with on_mesh.graph_of("all:8", [(3,)]) as (impl, values, _):
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(impl.shape, impl.layout_rules, devices)
        with tf.device(devices[0]):
            tensor = tf.placeholder(tf.float32, [3])
        out = reduce.FusedAllReduce().broadcast(impl, tensor, values[0])
        sources = [x.op.inputs[0].device for x in out.tensor_list]
    assert [s[:18] == d[:18] for s, d in zip(sources, devices)].count(False) == 1
