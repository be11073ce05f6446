"""FusedAllReduce on both kinds of mesh."""

import collections

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness
from tests.reduce import on_mesh

EPS = np.finfo(np.float32).eps
SHAPES = [(), (1,), (3,), (64, 4), (0, 2), (2, 3, 5), (300,)]
batch = mtf.Dimension("batch", 8)


def pending(mesh, inputs):
    grads = []
    for name in sorted(inputs):
        x = inputs[name]
        dims = [mtf.Dimension(f"d{i}", n) for i, n in enumerate(x.shape.as_list()[1:])]
        tensor = mtf.import_tf_tensor(mesh, x, mtf.Shape([batch, *dims]))
        grads.append(mtf.reduce_sum(tensor, reduced_dim=batch))
    return grads


def feed():
    rng = np.random.RandomState(0)
    return {f"g{i}": rng.randn(8, *shape).astype("f") for i, shape in enumerate(SHAPES)}


@pytest.mark.parametrize("bucket_bytes", [None, 0, 40, 1 << 20])
@pytest.mark.parametrize("mesh", ["8", "4x2", "2x2x2"])
def test_sums_equal_numpy(mesh_kind, mesh, bucket_bytes):
    mesh_shape, layout, _ = harness.MESHES[mesh]
    data = feed()

    def build(mtf_mesh, inputs):
        strategy = gs.FusedAllReduce(bucket_bytes)
        sums = gs.sum_shards(pending(mtf_mesh, inputs), reducer=strategy)
        return [], dict(zip(sorted(inputs), sums))

    out = harness.run(mesh_kind, mesh_shape, layout, build, [data]).fetched[0]
    for name, value in data.items():
        expected = value.sum(0, dtype=float)
        assert out[name].shape == expected.shape
        np.testing.assert_allclose(out[name], expected, atol=8 * EPS * 4)


@pytest.mark.parametrize(
    ("bucket_bytes", "collectives", "groups"),
    [(None, len(SHAPES) - 1, 1), (0, len(SHAPES) - 1, len(SHAPES) - 1), (1100, 3, 3)],
)
def test_simd_has_one_group_or_a_collective_a_bucket_and_no_extra_bytes(
    bucket_bytes, collectives, groups
):
    data = feed()
    with tf.Graph().as_default():
        inputs = {k: tf.constant(v) for k, v in data.items()}
        with simd.tpu_program("all:8", "batch:all") as program:
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            gs.sum_shards(pending(mesh, inputs), reducer=gs.FusedAllReduce(bucket_bytes))
            mtf.Lowering(graph, {mesh: program.mesh_impl})
        ops = [op for op in program.graph.get_operations() if op.type == "CrossReplicaSum"]
    assert len(ops) == collectives
    total = simd.list_collectives(program).update_step
    assert (total.operations, total.groups) == (collectives, groups)
    elements = sum(op.inputs[0].shape.num_elements() for op in ops)
    assert elements == sum(int(np.prod(shape)) for shape in SHAPES)


def test_dtypes_and_axes_stay_apart(mesh_kind):
    data = {"x": np.random.RandomState(0).randn(8, 4, 3).astype("f")}
    hidden, d = mtf.Dimension("hidden", 4), mtf.Dimension("d", 3)

    def build(mesh, inputs):
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, hidden, d]))
        half = mtf.cast(x, tf.bfloat16)
        sums = gs.sum_shards(
            [
                mtf.reduce_sum(x, output_shape=mtf.Shape([hidden])),
                mtf.reduce_sum(half, output_shape=mtf.Shape([hidden])),
                mtf.reduce_sum(x, output_shape=mtf.Shape([d])),
            ]
        )
        assert [s.dtype for s in sums] == [tf.float32, tf.bfloat16, tf.float32]
        return [], dict(zip("abc", sums))

    mesh_shape, layout, _ = harness.MESHES["4x2"]
    out = harness.run(mesh_kind, mesh_shape, layout, build, [data]).fetched[0]
    x = data["x"].astype(float)
    np.testing.assert_allclose(out["a"], x.sum((0, 2)), atol=32 * EPS)
    np.testing.assert_allclose(out["b"].astype(float), x.sum((0, 2)), atol=2**-8 * 24)
    np.testing.assert_allclose(out["c"], x.sum((0, 1)), atol=32 * EPS)


def test_placement_sums_take_turns_on_the_devices():
    with tf.Graph().as_default() as graph:
        inputs = {f"g{i}": tf.constant(np.ones((8, 4), "f")) for i in range(16)}
        mtf_graph = mtf.Graph()
        mesh = mtf.Mesh(mtf_graph, "mesh")
        gs.sum_shards(pending(mesh, inputs), reducer=gs.FusedAllReduce(0))
        mtf.Lowering(mtf_graph, {mesh: harness.placement("all:8", "batch:all")})
        sums = collections.Counter(op.device for op in graph.get_operations() if op.type == "AddN")
    assert sorted(sums.values()) == [2] * 8


@pytest.mark.parametrize(
    ("args", "sums"), [((), 2), ((64 << 10,), 1), ((1 << 20, 4096), 2), ((None, 64 << 10), 1)]
)
def test_large_tensors_share_no_bucket_by_default(args, sums):
    with on_mesh.graph_of("all:8", [(64,), (64,), (8192,)]) as (impl, values, graph):
        on_mesh.sums(gs.FusedAllReduce(*args))(impl, values)
        assert sum(op.type == "AddN" for op in graph.get_operations()) == sums


def test_bfloat16_sums_round_once():
    # 256 + 1 + ... + 1: each 1 alone is lost in bfloat16, all together they are not.
    data = {"x": np.array([256.0] + [1.0] * 7, "f")}

    def build(mesh, inputs):
        x = mtf.import_tf_tensor(mesh, tf.cast(inputs["x"], tf.bfloat16), mtf.Shape([batch]))
        return [], {"x": gs.sum_shards([mtf.reduce_sum(x)])[0]}

    out = harness.run("placement", "all:8", "batch:all", build, [data]).fetched[0]
    assert float(out["x"]) == 264.0
