"""HierarchicalAllReduce: what crosses the slow links, by which algorithm, in how many parts."""

import collections
import itertools

import numpy as np
import pytest

from mtf_gradsync import reduce, session_config, simd
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.reduce.hierarchical import inner_groups
from tests import harness
from tests.reduce import on_mesh

# A mesh of one axis over two processes, and one whose axes lie across the processes.
PROCESSES = [f"/job:worker/task:{i // 4}/device:CPU:{i % 4}" for i in range(8)]
INTERLEAVED = [f"/job:worker/task:{i % 2}/device:CPU:{i // 2}" for i in range(8)]
UNEVEN = [f"/job:worker/task:{i // 3}/device:CPU:{i % 3}" for i in range(8)]


def mesh(mesh_shape, devices=None):
    impl = harness.placement(mesh_shape, "")
    devices = devices or impl.devices
    return mtf.placement_mesh_impl.PlacementMeshImpl(impl.shape, impl.layout_rules, devices)


def sent(strategy, impl, place, size=12, axes=None):
    """Elements that one sum sends between places, each once for a device that reads it."""
    with tf.Graph().as_default() as graph:
        slices = []
        for device in impl.devices:
            with tf.device(device):
                slices.append(tf.placeholder(tf.float32, [size]))
        groups = reduce.ProcessorGroups.along(impl, range(impl.ndims) if axes is None else axes)
        (total,) = strategy.all_reduce(impl, [impl.LaidOutTensor(slices)], groups)
        for device, x in zip(impl.devices, total.tensor_list):
            with tf.device(device):
                tf.identity(x)
        number = {
            tf.DeviceSpec.from_string(device).to_string(): processor
            for processor, device in enumerate(impl.devices)
        }
        messages = {
            (x, op.device)
            for op in graph.get_operations()
            for x in op.inputs
            if x.dtype == tf.float32 and place(number[x.device]) != place(number[op.device])
        }
    return sum(x.shape.num_elements() for x, _ in messages)


@pytest.mark.parametrize(
    ("spec", "elements"),
    [
        ("add_n/add_n", 2 * 12),
        ("ring/add_n", 2 * 12),
        (("add_n/add_n", 4), 2 * 12),
        ("ring/ring", 2 * 12),
        # Four processors send to another process, and four read from it.
        ("add_n", 8 * 12),
    ],
)
@pytest.mark.parametrize("devices", [PROCESSES, INTERLEAVED])
def test_one_copy_of_each_process_is_sent_and_one_is_returned(spec, elements, devices):
    strategy = reduce.HierarchicalAllReduce(spec)
    impl = mesh("all:8", devices)
    assert sent(strategy, impl, lambda p: devices[p][:18]) == elements


def test_three_uneven_processes():
    impl = mesh("all:8", UNEVEN)
    strategy = reduce.HierarchicalAllReduce()
    assert inner_groups(impl, range(8), None) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert sent(strategy, impl, lambda p: UNEVEN[p][:18]) == 4 * 12


@pytest.mark.parametrize(
    ("outer_axes", "place", "elements"),
    [
        (None, lambda p: p // 2, 2 * 3 * 12),
        ("rows", lambda p: p // 2, 2 * 3 * 12),
        (("cols",), lambda p: p % 2, 2 * 12),
        ([1], lambda p: p % 2, 2 * 12),
    ],
)
def test_mesh_axes_make_levels_within_a_process(outer_axes, place, elements):
    strategy = reduce.HierarchicalAllReduce("add_n/add_n", outer_axes=outer_axes)
    assert sent(strategy, mesh("rows:4;cols:2"), place) == elements


def test_levels():
    cube = mesh("a:2;b:2;c:2")
    assert inner_groups(cube, range(8), None) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert inner_groups(cube, [4, 5, 6, 7], None) == [[4, 5], [6, 7]]
    assert inner_groups(cube, [2, 6], None) == [[2, 6]]
    assert inner_groups(cube, [2, 6], ["a"]) == [[2], [6]]
    assert inner_groups(cube, range(8), ["a", "c"]) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert inner_groups(cube, range(8), []) == [list(range(8))]
    assert inner_groups(mesh("a:2;b:4", INTERLEAVED), range(8), ["a"])[0] == [0, 1, 2, 3]


def test_sizes_choose_the_algorithm():
    strategy = reduce.HierarchicalAllReduce([("ring", 1, 40), ("add_n", 2, 400), ("add_n", 4, -1)])
    with on_mesh.graph_of("all:8", [(10,), (11,), (100,), (101,)]) as (impl, values, graph):
        on_mesh.sums(strategy)(impl, values)
        ops = collections.Counter(
            (op.type, op.outputs[0].shape.num_elements())
            for op in graph.get_operations()
            if op.type in ("AddN", "AddV2")
        )
    assert set(ops) == {("AddV2", 10), ("AddN", 5), ("AddN", 6), ("AddN", 50), ("AddN", 25)} | {
        ("AddN", 26)
    }


def test_shards_are_summed_on_different_devices():
    with on_mesh.graph_of("all:8", [(800,)]) as (impl, values, graph):
        strategy = reduce.HierarchicalAllReduce(("add_n", 8))
        on_mesh.sums(strategy)(impl, values)
        sums = [op for op in graph.get_operations() if op.type == "AddN"]
    assert {op.outputs[0].shape.num_elements() for op in sums} == {100}
    assert len({op.device for op in sums}) == 8


def test_inner_groups_of_different_sizes(mesh_kind, caplog):
    groups = [[0, 1, 2, 4], [3, 5, 6, 7]]
    x = np.random.RandomState(0).randn(8, 50).astype("f")

    def make(impl, values):
        strategy = reduce.HierarchicalAllReduce(("add_n/add_n", 2))
        assert sorted(len(i) for i in inner_groups(impl, groups[0], None)) == [1, 3]
        return strategy.all_reduce(impl, values, reduce.ProcessorGroups(groups))

    (out,) = on_mesh.run(mesh_kind, "a:2;b:2;c:2", [x], make)
    np.testing.assert_allclose(
        out, on_mesh.expected("", x, groups), atol=4 * 2.0**-24 * np.abs(x).max() * 4
    )
    warnings = [r.getMessage() for r in caplog.records if r.name == "mtf_gradsync"]
    assert len(warnings) == (mesh_kind == "simd")
    assert all("one level" in w for w in warnings)


def simd_sums(spec, shape, axes=(0, 1), **kwargs):
    """(elements, group size) of each CrossReplicaSum, on a mesh of 4x2 cores."""
    with tf.Graph().as_default() as graph:
        with simd.tpu_program("rows:4;cols:2", "") as program:
            impl = program.mesh_impl
            strategy = reduce.HierarchicalAllReduce(spec, **kwargs)
            on_mesh.sums(strategy, axes)(impl, [impl.LaidOutTensor([tf.ones(shape)])])
        return [
            (op.inputs[0].shape.num_elements(), len(tf.get_static_value(op.inputs[1])[0]))
            for op in graph.get_operations()
            if op.type == "CrossReplicaSum"
        ]


def test_simd_sums_inner_axes_first_and_shares_the_outer_sum_where_asked():
    assert simd_sums("add_n", [9]) == [(9, 8)]
    assert simd_sums("add_n/add_n", [9]) == [(9, 2), (9, 4)]
    assert simd_sums("add_n/add_n", [9], outer_axes="cols") == [(9, 4), (9, 2)]
    assert simd_sums("add_n/add_n", [9], axes=[1]) == [(9, 2)]
    # Each core of an inner pair takes half of 9 elements, rounded up, over the outer axis.
    assert simd_sums(("add_n/add_n", 2), [9]) == [(9, 2), (5, 4), (10, 2)]
    assert simd_sums(("add_n/add_n", 7), [9]) == [(9, 2), (5, 4), (10, 2)]
    assert simd_sums(("add_n/add_n", 2), []) == [(1, 2), (1, 4)]


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({"spec": "add_n/add_n"}, [(2, 4), (4, 4)]),
        # A scalar is not cut.
        ({"spec": ("add_n/add_n", 2)}, [(2, 4), (4, 4), (2, 3)]),
        ({"spec": [("add_n", 1, 12), ("add_n/add_n", 1)]}, [(8, 2), (2, 2), (4, 2)]),
        # Packs that were asked for stay as they are.
        ({"num_packs": 1}, []),
    ],
)
def test_each_level_is_a_group_of_simd_sums_that_are_neighbours(settings, groups):
    """Pairs of how many cores sum and how many sums, in order."""
    with tf.Graph().as_default():
        with simd.tpu_program("rows:4;cols:2", "") as program:
            impl = program.mesh_impl
            shapes = [
                ((), tf.float32),
                ((9,), tf.bfloat16),
                ((3,), tf.float32),
                ((9, 2), tf.float32),
            ]
            values = [impl.LaidOutTensor([tf.zeros(*one)]) for one in shapes]
            strategy = reduce.HierarchicalAllReduce(**settings)
            on_mesh.sums(strategy, [0, 1])(impl, values)
        rows = [r for r in simd.list_collectives(program).rows if r.together]
    size = {"rows": 4, "cols": 2, "rows+cols": 8}
    found = [
        (size[group], len(list(some)))
        for (_, group), some in itertools.groupby(rows, lambda r: (r.together, str(r.group)))
    ]
    assert found == groups
    assert len({r.together for r in rows}) == len(groups)


@pytest.mark.parametrize("order", [None, harness.SHUFFLED])
def test_simd_shared_sums_are_right_and_keep_infinities_where_they_are(order):
    x = np.random.RandomState(0).randn(8, 3, 5).astype("f")
    x[3, 1, 1] = np.inf
    groups = [[0, 5, 6, 3], [7, 2, 1, 4]]

    sums = on_mesh.sums(reduce.HierarchicalAllReduce(("add_n/add_n", 2)), groups=groups)
    (out,) = on_mesh.run("simd", "a:2;b:2;c:2", [x], sums, logical_to_physical=order)
    assert np.isinf(out).sum() == 4
    np.testing.assert_allclose(out, on_mesh.expected("", x, groups), rtol=0, atol=4 * 2.0**-24 * 12)


def test_specifications_are_completed():
    entry = reduce.AllReduceSpec
    assert reduce.HierarchicalAllReduce("ring").spec == (entry("ring", 1, -1),)
    assert reduce.HierarchicalAllReduce(("ring", 2)).spec == (entry("ring", 2, -1),)
    spec = [("ring", 1, 10), entry("add_n/ring", 3, None)]
    assert reduce.HierarchicalAllReduce(spec).spec == (
        entry("ring", 1, 10),
        entry("add_n/ring", 3, -1),
    )


@pytest.mark.parametrize(
    ("strategy", "copies"),
    [
        (reduce.HierarchicalAllReduce(), 2),
        (reduce.HierarchicalAllReduce(("add_n/add_n", 3), num_packs=1), 2),
        (reduce.CompressedAllReduce(reduce.HierarchicalAllReduce()), 1),
    ],
)
def test_what_devices_share_is_sent_once(strategy, copies):
    """A gradient that is not split over a process's devices is one tensor for all of them."""
    impl = reduce.placement_mesh_impl("rows:2;cols:4", "", PROCESSES)
    values = []
    for size in (12, 30):
        slices = []
        for device in PROCESSES[::4]:
            with tf.device(device):
                slices += [tf.placeholder(tf.float32, [size])] * 4
        values.append(impl.LaidOutTensor(slices))
    groups = reduce.ProcessorGroups.along(impl, [0])
    used = []
    for total in strategy.all_reduce(impl, values, groups):
        used += [x.op for x in mtf.parallel(PROCESSES, tf.identity, total.tensor_list)]
    assert simd.count_process_transfers(used).bytes == copies * 4 * (12 + 30)


def test_sums_of_what_devices_share_are_right():
    devices = [f"/device:CPU:{i}" for i in range(8)]
    impl = reduce.placement_mesh_impl("rows:2;cols:4", "", devices)
    # Columns 0 and 1 have the same, and so have 2 and 3, but only in row 0.
    shares = [0, 0, 1, 1, 2, 2, 3, 4]
    tensors = [tf.constant([10.0**i, 1.0]) for i in range(5)]
    value = impl.LaidOutTensor([tensors[i] for i in shares])
    strategy = reduce.HierarchicalAllReduce(outer_axes="rows")
    (total,) = on_mesh.sums(strategy)(impl, [value])
    assert len(set(total.tensor_list)) == 3
    with tf.Session(config=session_config(num_cpu_devices=8)) as session:
        out = session.run(total.tensor_list)
    expected = [10.0 ** shares[c] + 10.0 ** shares[4 + c] for c in range(4)] * 2
    np.testing.assert_array_equal(out, [[x, 2.0] for x in expected])
