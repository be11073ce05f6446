"""The placement mesh whose collectives go by a strategy."""

import collections
import contextlib
import itertools

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

EPS = np.finfo(np.float32).eps
MESHES = {
    "4": ("all:4", "batch:all;hidden:all"),
    "2x2": ("rows:2;cols:2", "batch:rows;hidden:cols;out:rows"),
    "2x2x2": ("a:2;b:2;c:2", "batch:a;hidden:b;out:c"),
}
BATCH, IN, HIDDEN, OUT = 8, 5, 16, 8


def ours(mesh_shape, layout, strategy=None, devices=None):
    size = mtf.convert_to_shape(mesh_shape).size
    devices = devices or [f"/device:CPU:{i}" for i in range(size)]
    return gs.placement_mesh_impl(mesh_shape, layout, devices, reducer=strategy)


def evaluate(mesh_impl, build, **inputs):
    """Values of the mtf tensors that build(mesh, **imported) returns, and the lowering."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        # Exporting combines slices as their layout says; slices that differ where the layout says
        # that they are copies would go unseen.
        tensors = build(mesh, **{k: tf.constant(v) for k, v in inputs.items()})
        lowering = mtf.Lowering(graph, {mesh: mesh_impl})
        values = [lowering.export_to_tf_tensor(t) for t in tensors]
        slices = [lowering.tensors[t].to_laid_out_tensor().all_slices for t in tensors]
        config = gs.session_config(num_cpu_devices=mesh_impl.size)
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.Session(config=config) as session:
            return session.run([values, slices])


class Reference:
    """A layer with a softmax in numpy float64, and the gradient of its loss."""

    def __init__(self, x, w, v):
        x, w, v = (a.astype(np.float64) for a in (x, w, v))
        pre = x @ w
        self.h = np.maximum(pre, 0)
        logits = self.h @ v
        shifted = np.exp(logits - logits.max(1, keepdims=True))
        self.p = shifted / shifted.sum(1, keepdims=True)
        self.loss = (self.p**2).sum()
        dp = 2 * self.p
        dlogits = self.p * (dp - (dp * self.p).sum(1, keepdims=True))
        self.dv = self.h.T @ dlogits
        self.dw = x.T @ ((dlogits @ v.T) * (pre > 0))
        self.largest, self.smallest = logits.max(), logits.min()


def data():
    rng = np.random.RandomState(0)
    return {
        "x": rng.randn(BATCH, IN).astype("f"),
        "w": rng.randn(IN, HIDDEN).astype("f"),
        "v": rng.randn(HIDDEN, OUT).astype("f"),
    }


def program(mesh, x, w, v):
    """Forward and backward; sums and a softmax over split dimensions, relayouts both ways."""
    batch, rows = mtf.Dimension("batch", BATCH), mtf.Dimension("in", IN)
    hidden, out = mtf.Dimension("hidden", HIDDEN), mtf.Dimension("out", OUT)
    x = mtf.import_tf_tensor(mesh, x, mtf.Shape([batch, rows]))
    # Split where the layout splits "hidden" and not "batch": on the mesh of 4 both are the same.
    anonymous = mtf.Dimension("b", BATCH)
    w = mtf.import_tf_tensor(mesh, w, mtf.Shape([rows, hidden]))
    v = mtf.import_tf_tensor(mesh, v, mtf.Shape([hidden, out]))
    x_whole = mtf.rename_dimension(x, "batch", "b")  # allconcat
    h = mtf.relu(mtf.einsum([x_whole, w], [anonymous, hidden]))
    logits = mtf.einsum([h, v], [anonymous, out])  # sum over hidden
    # From one split dimension to another: alltoall; or a slice of what is whole.
    logits = mtf.reshape(logits, mtf.Shape([batch, mtf.Dimension("unsplit_out", OUT)]))
    logits = mtf.reshape(logits, mtf.Shape([anonymous, out]))
    p = mtf.softmax(logits, out)  # max and sum over out
    loss = mtf.reduce_sum(mtf.square(p))
    dw, dv = mtf.gradients([loss], [w, v])
    return [loss, h, p, dw, dv, mtf.reduce_max(logits), mtf.reduce_min(logits)]


@pytest.mark.parametrize(("mesh", "strategy"), harness.pairs(MESHES, [None, gs.FusedAllReduce(0)]))
def test_program_equals_numpy(mesh, strategy):
    inputs = data()
    expected = Reference(**inputs)
    values, _ = evaluate(ours(*MESHES[mesh], strategy), program, **inputs)
    wanted = ["loss", "h", "p", "dw", "dv", "largest", "smallest"]
    for name, value in zip(wanted, values):
        # A few dozen roundings of numbers whose partial sums are below 64.
        np.testing.assert_allclose(value, getattr(expected, name), atol=64 * 32 * EPS, err_msg=name)


def layouts_of_a_matrix(mesh_shape, layout):
    """Shapes of an 8x8 matrix whose dimensions stand split in all ways that the layout knows."""
    rules = mtf.convert_to_layout_rules(layout)
    for names in itertools.permutations(["batch", "hidden", "out", "i"], 2):
        shape = mtf.Shape([mtf.Dimension(name, 8) for name in names])
        with contextlib.suppress(ValueError):  # two dimensions on one mesh axis
            if rules.tensor_layout(shape, mtf.convert_to_shape(mesh_shape)):
                yield shape


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.mostly_slow
def test_is_mesh_tfs_bit_for_bit_where_nothing_is_added(mesh):
    shapes = list(layouts_of_a_matrix(*MESHES[mesh]))
    assert len(shapes) > 6

    def moves(mtf_mesh, x):
        results = []
        for number, shape in enumerate(shapes):
            y = mtf.import_tf_tensor(mtf_mesh, x, shape)
            # In turns: each of them from, and along, every second.
            further, extreme = [(1, mtf.reduce_max), (3, mtf.reduce_min)][number // 2 % 2]
            dim = shape.dims[number % 2]
            results.append(mtf.reshape(y, shapes[(number + further) % len(shapes)]))
            results.append(extreme(y, reduced_dim=dim))
            results.append(mtf.shift(y, 1, dim, wrap=True))
        results.append(
            mtf.top_k(
                mtf.import_tf_tensor(mtf_mesh, x, shapes[0]),
                shapes[0].dims[0],
                mtf.Dimension("k", 2),
            )[1]
        )
        i = mtf.mtf_range(mtf_mesh, mtf.Dimension("i", 8), tf.int32)
        return [*results, mtf.one_hot(i, mtf.Dimension("hidden", 16))]

    x = np.random.RandomState(0).permutation(64).reshape(8, 8).astype("f")
    expected = evaluate(harness.placement(*MESHES[mesh]), moves, x=x)
    actual = evaluate(ours(*MESHES[mesh]), moves, x=x)
    for a, b in zip(tf.nest.flatten(actual), tf.nest.flatten(expected)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def count(graph, *types):
    """Where operations of these types run."""
    return collections.Counter(op.device for op in graph.get_operations() if op.type in types)


def lower_sums(mesh_impl, number=16, dtype=tf.float32, fn=mtf.reduce_sum):
    """Sums (or maxima) of `number` tensors over a split dimension; their slices."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    shape = mtf.Shape([mtf.Dimension("batch", 8), mtf.Dimension("hidden", 16)])
    tensors = [
        fn(mtf.import_tf_tensor(mesh, tf.ones([8, 16], dtype), shape), reduced_dim=shape.dims[0])
        for _ in range(number)
    ]
    lowering = mtf.Lowering(graph, {mesh: mesh_impl})
    return [lowering.tensors[t].to_laid_out_tensor().tensor_list for t in tensors]


@pytest.mark.parametrize(("fn", "op"), [(mtf.reduce_sum, "AddN"), (mtf.reduce_max, "Maximum")])
def test_work_goes_round_the_devices(fresh_graph, fn, op):
    lower_sums(ours("all:8", "batch:all"), fn=fn)
    counts = count(fresh_graph, op)
    assert len(counts) == 8
    assert len({*counts.values()}) == 1


def test_copies_of_a_tensor_stay_copies_to_the_bit():
    """On 4x2 both columns hold the same; their sums over the rows have to be the same too."""
    x = np.random.RandomState(0).randn(8, 16).astype("f")

    def build(mesh, x):
        shape = mtf.Shape([mtf.Dimension("batch", 8), mtf.Dimension("d", 16)])
        x = mtf.import_tf_tensor(mesh, x, shape)
        return [mtf.reduce_sum(x * i, reduced_dim=shape.dims[0]) for i in range(1, 9)]

    _, slices = evaluate(ours("rows:4;cols:2", "batch:rows"), build, x=x)
    for one in slices:
        assert len({s.tobytes() for s in one}) == 1


def test_sums_stay_lazy_until_they_are_needed(fresh_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    shape = mtf.Shape([mtf.Dimension("batch", 8), mtf.Dimension("hidden", 16)])
    x = mtf.import_tf_tensor(mesh, tf.ones([8, 16]), shape)
    total = mtf.add_n([mtf.reduce_sum(x, reduced_dim=shape.dims[0]) for _ in range(3)])
    lowering = mtf.Lowering(graph, {mesh: ours("all:8", "batch:all")})
    lazy = lowering.tensors[total]
    assert isinstance(lazy, mtf.LazyAllreduceSum)
    before = count(fresh_graph, "AddN").total()
    summed = lazy.to_laid_out_tensor()
    assert summed is lazy.to_laid_out_tensor()
    assert count(fresh_graph, "AddN").total() == before + 1


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_narrow_sums_round_once(dtype):
    # One that each addition of a 1 to it would round back to itself.
    first = 256.0 if dtype == tf.bfloat16 else 2048.0

    def build(mesh, x):
        batch = mtf.Dimension("batch", 8)
        x = mtf.import_tf_tensor(mesh, tf.cast(x, dtype), mtf.Shape([batch]))
        return [mtf.reduce_sum(x)]

    x = np.array([first] + [1.0] * 6 + [2.0], "f")
    (total,), _ = evaluate(ours("all:8", "batch:all"), build, x=x)
    assert total.dtype == dtype
    assert float(total) == first + 8


def cluster_devices(processes, each):
    return [f"/job:worker/task:{t}/device:CPU:{d}" for t in range(processes) for d in range(each)]


def crossings(graph):
    """Tensors that go to another process, once for each device that reads them there."""
    pairs = set()
    for op in graph.get_operations():
        for x in op.inputs:
            tasks = [tf.DeviceSpec.from_string(o.device).task for o in (x.op, op)]
            if None not in tasks and tasks[0] != tasks[1]:
                pairs.add((x.name, op.device))
    return len(pairs)


def test_between_processes_a_maximum_is_one_tensor_each_way(fresh_graph):
    lower_sums(ours("all:8", "batch:all", devices=cluster_devices(2, 4)), 1, fn=mtf.reduce_max)
    assert crossings(fresh_graph) == 2


def test_between_processes_a_slice_is_sent_once(fresh_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    shape = mtf.Shape([mtf.Dimension("batch", 8)])
    # Slices of its own on each device: what is imported starts on none.
    x = mtf.import_tf_tensor(mesh, tf.ones([8]), shape) + 1.0
    whole = mtf.rename_dimension(x, "batch", "whole")
    mesh_impl = ours("all:8", "batch:all", devices=cluster_devices(2, 4))
    mtf.Lowering(graph, {mesh: mesh_impl}).tensors[whole].to_laid_out_tensor()
    assert crossings(fresh_graph) == 8


@pytest.mark.parametrize("devices", [["gpu:0", "gpu:1", "gpu:2", "gpu:3"], cluster_devices(4, 1)])
def test_devices_that_share_nothing_keep_the_ring(devices):
    types = []
    for mesh_impl in (
        ours("all:4", "batch:all", devices=devices),
        mtf.placement_mesh_impl.PlacementMeshImpl("all:4", "batch:all", devices),
    ):
        with tf.Graph().as_default() as graph:
            lower_sums(mesh_impl, 1, fn=mtf.reduce_max)
            types.append([(op.type, op.device) for op in graph.get_operations()])
    assert types[0] == types[1]


def test_wrong_number_of_devices_is_refused():
    with pytest.raises(ValueError, match=r"each of the 8 processors .* got 4"):
        gs.placement_mesh_impl("all:8", "batch:all", [""] * 4)


@pytest.mark.parametrize("devices", ["cpu:0", [0] * 8, None, 8])
def test_devices_that_are_none_are_refused(devices):
    with pytest.raises(TypeError, match="devices must be a list of device strings"):
        gs.placement_mesh_impl("all:8", "batch:all", devices)


def test_strings_that_name_no_device_are_refused():
    with pytest.raises(ValueError, match=r"devices.*'first'"):
        gs.placement_mesh_impl("all:2", "", ["/device:CPU:0", "first"])
    # Mesh-TF's own way to leave the choice to TensorFlow.
    assert gs.placement_mesh_impl("all:2", "", ["", ""]).devices == ["", ""]


def test_a_reducer_that_is_none_is_refused():
    with pytest.raises(TypeError, match="reducer must be a strategy"):
        gs.placement_mesh_impl("all:8", "batch:all", [""] * 8, reducer=gs.FusedAllReduce)


def test_unknown_reductions_are_refused_as_by_mesh_tf():
    with pytest.raises(ValueError, match="PROD"):
        ours("all:8", "batch:all").allreduce(
            mtf.placement_mesh_impl.PlacementMeshImpl.LaidOutTensor([tf.ones(2)] * 8), [0], "PROD"
        )
