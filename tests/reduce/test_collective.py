"""Sums by TensorFlow's collective operations."""

import collections
import logging
import os

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import reduce
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.reduce import collective
from tests import harness, models, reference
from tests.reduce import on_mesh
from tests.reduce.every_strategy import SHAPES

DEVICES = [f"/device:CPU:{i}" for i in range(8)]
# As for trajectories of other strategies: a few ulp of values around 1 a step.
TOLERANCE = 5 * 16 * np.finfo(np.float32).eps


def collectives(graph):
    return [op for op in graph.get_operations() if op.type == "CollectiveReduceV2"]


@pytest.mark.parametrize(("merge_scope", "number"), [(1, 7), (3, 3), (32, 1)])
def test_merges_as_many_tensors_as_asked(merge_scope, number):
    with on_mesh.graph_of("all:8", SHAPES) as (impl, values, graph):
        on_mesh.sums(reduce.CollectiveAllReduce(merge_scope))(impl, values)
        ops = collectives(graph)
    assert len(ops) == 8 * number
    assert collections.Counter(op.device for op in ops) == dict.fromkeys(DEVICES, number)


def test_keys_are_one_for_each_group_and_one_for_each_collective():
    def key(op, number):
        return int(tf.get_static_value(op.inputs[number]))

    with on_mesh.graph_of("rows:4;cols:2", [(3,), (4,)]) as (impl, values, graph):
        for axes in ([0], [1], [0]):
            on_mesh.sums(reduce.CollectiveAllReduce(1), axes)(impl, values)
        ops = collectives(graph)
    members = collections.defaultdict(set)
    for op in ops:
        members[key(op, 2)].add(op.device)
    assert sorted(map(sorted, members.values())) == sorted(
        [DEVICES[c::2] for c in range(2)] + [DEVICES[2 * r : 2 * r + 2] for r in range(4)]
    )
    instances = collections.Counter((key(op, 2), key(op, 3)) for op in ops)
    assert all(count == len(members[group]) for (group, _), count in instances.items())
    assert len({key(op, 3) for op in ops}) == len(instances)


def test_the_next_client_of_the_same_workers_takes_other_keys():
    """Workers outlive a client, and refuse a key that they have seen with another shape."""
    clients = [collective._instance_keys_of_a_client() for _ in range(3)]
    keys = [next(client) for client in clients for _ in range(100)]
    assert len(set(keys)) == 300
    assert all(0 < key < 2**31 for key in keys)


def test_a_fetch_of_one_processors_sum_does_not_wait_for_ever():
    """A session leaves out what it need not run; a collective's other members are needed."""

    def make(impl, values):
        summed = on_mesh.sums(reduce.CollectiveAllReduce(1, timeout_seconds=60))(impl, values)
        return [impl.LaidOutTensor([x.tensor_list[5]]) for x in summed[::-1]]

    data = [np.ones([8, 3], "f"), np.ones([8, 2], "f")]
    out = on_mesh.run("placement", "all:8", data, make)
    np.testing.assert_array_equal(np.concatenate(out, 1), np.full([1, 5], 8.0))


def wait_chain(first, second):
    """Whether operations of the second list come after all of the first."""
    reached, pending = set(), list(second)
    while pending:
        op = pending.pop()
        if op.name not in reached:
            reached.add(op.name)
            pending += [*op.control_inputs, *(x.op for x in op.inputs)]
    return {op.name for op in first} <= reached


def test_collectives_of_a_device_have_one_order():
    with on_mesh.graph_of("rows:4;cols:2", [(3,), (4,)]) as (impl, values, graph):
        for axes in ([0], [1], [0, 1]):
            on_mesh.sums(reduce.CollectiveAllReduce(1), axes)(impl, values)
        by_device = collections.defaultdict(list)
        for op in collectives(graph):
            by_device[op.device].append(op)
        for ops in by_device.values():
            assert len(ops) == 6
            for before, after in zip(ops, ops[1:]):
                assert wait_chain([before], [after])
    # Groups that share no device do not wait for each other.
    assert not wait_chain(by_device[DEVICES[0]][:1], by_device[DEVICES[1]][:1])


def test_a_device_is_the_same_by_whatever_name():
    with on_mesh.graph_of("all:8", [(3,)]) as (impl, values, graph):
        groups = reduce.ProcessorGroups.along(impl, [0])
        short = harness.placement("all:8", "")
        short.devices[:] = [f"cpu:{i}" for i in range(8)]
        for mesh in (impl, short):
            reduce.CollectiveAllReduce().all_reduce(mesh, values, groups)
        first, second = collectives(graph)[:8], collectives(graph)[8:]
    assert all(wait_chain(first, [op]) for op in second)


def test_twenty_sessions_end_with_the_same_bits():
    """Neither who comes first nor how often sessions are made shows in a sum."""
    impl = harness.placement("rows:4;cols:2", "")
    rng = np.random.RandomState(0)
    value = impl.LaidOutTensor(
        [tf.placeholder_with_default(rng.randn(99).astype("f"), [99]) for _ in DEVICES]
    )
    sums = []
    for axes in ([0], [1], [0, 1], [0]):
        sums += on_mesh.sums(reduce.CollectiveAllReduce(1), axes)(impl, [value, value])
    slices = [x.tensor_list for x in sums]
    seen = set()
    for _ in range(20):
        with tf.Session(config=gs.session_config(num_cpu_devices=8)) as session:
            for _ in range(2):
                seen.add(b"".join(x.tobytes() for x in tf.nest.flatten(session.run(slices))))
    assert len(seen) == 1


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs the threads of Linux")
def test_steps_leave_no_threads_behind():
    """With a timeout each step leaves two for each member, which sleep until it is over."""
    impl = harness.placement("all:8", "")
    value = impl.LaidOutTensor([tf.placeholder_with_default(np.ones(3, "f"), [3])] * 8)
    (out,) = on_mesh.sums(reduce.CollectiveAllReduce())(impl, [value])
    with tf.Session(config=gs.session_config(num_cpu_devices=8)) as session:
        for _ in range(5):
            session.run(out.tensor_list)
        before = len(os.listdir("/proc/self/task"))
        for _ in range(10):
            session.run(out.tensor_list)
        after = len(os.listdir("/proc/self/task"))
    # Idle threads of a pool come and go; ten steps of eight members with a timeout leave 160.
    assert after < before + 40


@pytest.mark.parametrize("place", ["local", "synced"])
@pytest.mark.mostly_slow
def test_update_in_a_branch(mesh_kind, place):
    """On one process the branch is a function, which no collective can run in."""
    mesh_shape, layout, _ = harness.MESHES["2"]
    where = {"mesh_shape": mesh_shape, "layout": layout} if place == "local" else {}
    feeds = models.mlp_batches(4)

    def make():
        return gs.GradientAccumulationOptimizer(
            models.OPTIMIZERS["adam"](), 2, reducer=reduce.CollectiveAllReduce(), **where
        )

    result = harness.run(mesh_kind, mesh_shape, layout, models.train(make), feeds)
    expected = reference.train(reference.Accumulation(reference.Adam(), 2), feeds)
    reference.assert_close(result.variables, expected, TOLERANCE)


def test_branches_and_loops_of_the_graph_itself():
    """Control flow v1, as on a cluster."""
    impl = harness.placement("all:8", "batch:all")
    groups = reduce.ProcessorGroups.along(impl, [0])
    strategy = reduce.CollectiveAllReduce(1)
    take = tf.placeholder(tf.bool, [])

    def summed(slices):
        values = [impl.LaidOutTensor(list(slices))] * 2
        first, second = strategy.all_reduce(impl, values, groups)
        return [(a + b) / 16 for a, b in zip(first.tensor_list, second.tensor_list)]

    before = summed([tf.fill([2], float(i)) for i in range(8)])
    branch = tf.cond(take, lambda: summed(before), lambda: [tf.zeros([2])] * 8)
    loop = tf.while_loop(
        lambda i, *slices: i < 3,
        lambda i, *slices: [i + 1, *[x + 1 for x in summed(slices)]],
        [tf.constant(0), *branch],
    )
    after = summed(loop[1:])
    with tf.Session(config=gs.session_config(num_cpu_devices=8)) as session:
        for taken in (True, False, True):
            value = session.run(after, {take: taken})[7]
            np.testing.assert_allclose(value, [6.5 if taken else 3.0] * 2)


@pytest.mark.parametrize("kind", ["simd", "function"])
def test_where_there_are_none_one_warning_says_so(caplog, kind):
    data = [np.ones([8, 3], "f")]

    def make(impl, values):
        groups = reduce.ProcessorGroups.along(impl, [0])
        strategy = reduce.CollectiveAllReduce()

        def twice():
            return [strategy.all_reduce(impl, values, groups)[0] for _ in range(2)]

        if kind == "simd":
            return twice()
        inside = tf.function(lambda: [x.tensor_list for x in twice()], autograph=False)
        return [impl.LaidOutTensor(list(x)) for x in inside()]

    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        out = on_mesh.run("simd" if kind == "simd" else "placement", "all:8", data, make)
    np.testing.assert_array_equal(out, np.full([2, 8, 3], 8.0))
    assert len(caplog.records) == 1
    assert "CollectiveAllReduce" in caplog.text


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (
            ["/job:localhost/replica:0/task:0/device:CPU:0", "cpu:0"],
            "a device of its own.*num_cpu_devices",
        ),
        (["/device:CPU:0", "/device:GPU:0"], "one kind.*GPU:0"),
    ],
)
def test_groups_that_could_only_wait_are_refused(devices, message, compressed, fresh_graph):
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "", devices)
    value = impl.LaidOutTensor([tf.placeholder(tf.float32, [2])] * 2)
    strategy = reduce.CollectiveAllReduce()
    if compressed:
        strategy = reduce.CompressedAllReduce(strategy)
    with harness.unchanged(), pytest.raises(ValueError, match=message):
        on_mesh.sums(strategy)(impl, [value])
