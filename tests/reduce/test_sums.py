"""Sums that add in one order, whoever else still holds what is added, and once for all copies."""

import functools

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import reduce, session_config
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.reduce.sums import ordered_add_n
from mtf_gradsync.step.conditional import _takes_attributes, run_as_call
from tests import grappler as grapplers
from tests import harness
from tests.reduce import on_mesh

SIZE = 1000
DEVICES = 8
# A kernel may add up in the memory of any input that nobody else holds: all of them, those behind
# the first few, none.
HELD = [(), (0, 1), (0, 1, 2, 4), tuple(range(DEVICES))]


def data(number=DEVICES):
    return np.random.RandomState(number).randn(number, SIZE).astype("f")


def one_after_the_other(arrays):
    """The sum in float32 from the first array to the last; beyond nine, eight at a time."""
    first = (len(arrays) - 2) % 8 + 2
    eights = np.split(arrays[first:], (len(arrays) - first) // 8) if len(arrays) > first else []
    parts = [functools.reduce(np.add, part) for part in [arrays[:first], *eights]]
    return functools.reduce(np.add, parts)


def made(fed):
    """The rows of a tensor as results of operations on each device, which kernels may reuse."""
    slices = []
    for i in range(fed.shape[0]):
        with tf.device(f"/device:CPU:{i % DEVICES}"):
            slices.append(fed[i] * (fed[0, 0] / fed[0, 0]))
    return slices


def readers(slices, held, total):
    """Operations that hold some of the slices until the total is there."""
    with tf.control_dependencies([total]):
        return [tf.identity(tf.reduce_sum(slices[i])) for i in held]


def run(fetches, feeds, grappler=False):
    config = session_config(num_cpu_devices=DEVICES)
    with grapplers.as_users_have_it(grappler), tf.Session(config=config) as session:
        return session.run(fetches, feeds)


def sum_with_readers(add_n, arrays, held, grappler=False):
    fed = tf.placeholder(tf.float32, arrays.shape)
    slices = made(fed)
    total = add_n(slices)
    return run([tf.identity(total), *readers(slices, held, total)], {fed: arrays}, grappler)[0]


def test_readers_change_the_order_of_tensorflows_add_n():
    """What the tests below would not see if it were not so."""
    results = {sum_with_readers(tf.add_n, data(), held).tobytes() for held in HELD}
    assert len(results) > 1


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("number", [3, 8, 19])
@pytest.mark.parametrize("grappler", [False, True])
def test_order_is_that_of_the_list(number, held, grappler):
    arrays, held = data(number), [i for i in held if i < number]
    out = sum_with_readers(ordered_add_n, arrays, held, grappler)
    np.testing.assert_array_equal(out, one_after_the_other(arrays))


@pytest.mark.skipif(not _takes_attributes(), reason="this TensorFlow inlines every function")
@pytest.mark.parametrize("held", HELD)
def test_order_in_a_call(held):
    arrays = data()
    fed = tf.placeholder(tf.float32, arrays.shape)
    result = tf.get_variable("result", [SIZE], initializer=tf.zeros_initializer())

    def body():
        slices = made(fed)
        total = ordered_add_n(slices)
        return tf.group(result.assign(total), *readers(slices, held, total))

    with tf.control_dependencies([result.initializer]):
        call = run_as_call(body)
    with tf.control_dependencies([call]):
        out = run(result.read_value(), {fed: arrays})
    np.testing.assert_array_equal(out, one_after_the_other(arrays))


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize(
    "strategy",
    [
        reduce.FusedAllReduce(),
        reduce.AllReduce("add_n"),
        reduce.ReductionToOneDevice(),
        reduce.ReductionToOneDevice(accumulation_fn=lambda xs: tf.add_n(xs)),
        reduce.HierarchicalAllReduce(),
    ],
    ids=["fused", "packs", "one device", "own function", "levels"],
)
def test_order_of_strategies(strategy, held):
    arrays = data()
    fed = tf.placeholder(tf.float32, arrays.shape)
    slices = made(fed)
    impl = harness.placement("all:8", "")
    (result,) = on_mesh.sums(strategy)(impl, [impl.LaidOutTensor(slices)])
    late = [x for total in result.tensor_list for x in readers(slices, held, total)]
    out = run([*map(tf.identity, result.tensor_list), *late], {fed: arrays})[:DEVICES]
    for total in out:
        np.testing.assert_array_equal(total, one_after_the_other(arrays))


def test_no_sum_of_a_norm_is_left_to_the_kernel(fresh_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x, y, z = mtf.Dimension("x", 4), mtf.Dimension("y", 4), mtf.Dimension("z", 3)
    # Four gradients that are split alike, and four ways to be split.
    shapes = [mtf.Shape(dims) for dims in ([x], [y], [x, y], [z], [z], [z], [z])]
    grads = [mtf.import_tf_tensor(mesh, tf.ones(s.to_integer_list), s) for s in shapes]
    gs.clip_by_global_norm(grads, 1.0)
    mtf.Lowering(graph, {mesh: harness.placement("a:2;b:2;c:2", "x:a;y:b")})
    sums = [op for op in fresh_graph.get_operations() if op.type == "AddN" and len(op.inputs) > 2]
    assert {len(op.inputs) for op in sums} == {4}
    assert len(sums) >= 2 * 8
    assert [op.name for op in sums if "_forward_input" not in op.node_def.attr] == []


@pytest.mark.parametrize(
    ("strategy", "bound"),
    [
        (reduce.FusedAllReduce(), 0),
        (reduce.AllReduce(), 0),
        (reduce.AllReduce("ring"), 0),
        (reduce.ReductionToOneDevice("/device:CPU:5"), 0),
        (reduce.CompressedAllReduce(), 2.01 * 2.0**-8),
    ],
    ids=["fused", "one pack", "ring", "one device", "compressed"],
)
def test_copies_that_devices_share_are_summed_once(strategy, bound):
    impl = gs.placement_mesh_impl("rows:2;cols:4", "", [f"/device:CPU:{i}" for i in range(8)])
    # Columns 0 and 1 have the same, and so have 2 and 3, but only in row 0.
    copies = [0, 0, 1, 1, 2, 2, 3, 4]
    values, expected, sizes = [], [], []
    for seed in (0, 1):
        arrays = np.random.RandomState(seed).randn(5, 6).astype("f")
        tensors = [tf.constant(x) for x in arrays]
        values.append(impl.LaidOutTensor([tensors[i] for i in copies]))
        for result, x in ((expected, arrays), (sizes, np.abs(arrays))):
            result.append([x[copies[c]] + x[copies[4 + c]] for c in range(4)] * 2)
    sums = [x.tensor_list for x in on_mesh.sums(strategy)(impl, values)]
    # Each value and each sum is rounded once to what is sent, if that is narrower.
    assert (np.abs(np.subtract(run(sums, {}), expected)) <= bound * np.array(sizes)).all()
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7)]
    for one in sums:
        assert [one[p] is one[q] for p, q in pairs] == [True, False, True, False]


def test_copies_in_another_memory_are_summed_there(fresh_graph):
    devices = [f"/job:worker/task:{c // 2}/device:CPU:{c % 2}" for c in range(4)] * 2
    impl = gs.placement_mesh_impl("rows:2;cols:4", "", devices)
    x, y = tf.ones([3]), tf.ones([3])
    value = impl.LaidOutTensor([x] * 4 + [y] * 4)
    on_mesh.sums(reduce.FusedAllReduce())(impl, [value])
    devices = [op.device for op in fresh_graph.get_operations() if op.type == "AddN"]
    assert sorted(tf.DeviceSpec.from_string(d).task for d in devices) == [0, 1]
