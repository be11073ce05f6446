"""Each processor gets its part of a sum, and parts are put together again."""

import numpy as np
import pytest

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh import devices
from mtf_gradsync.reduce import (
    BestAllReduce,
    CompressedAllReduce,
    FusedAllReduce,
    ProcessorGroups,
)
from mtf_gradsync.reduce.parts import Cut, all_gather
from mtf_gradsync.runtimes.simd.emulator import emulate
from tests.reduce import on_mesh

# The first fills a tile of a TPU's memory and more.
SHAPES = [(8, 600), (3, 4), (4,)]
KINDS = ["placement", "own memories", "simd"]
# Mesh, axes that are summed over, and how each value is cut.
CASES = [
    ("4x2", [0], [[Cut(0, 0)], [Cut(0, 1)], [Cut(0, 0)]]),
    ("4x2", [0, 1], [[Cut(0, 0), Cut(1, 1)], [Cut(0, 1)], [Cut(0, 0)]]),
    ("2x2x2", [0, 2], [[Cut(0, 1), Cut(2, 0)], [Cut(2, 1)], [Cut(0, 0)]]),
]
STRATEGIES = {
    "fused": FusedAllReduce,
    "best": BestAllReduce,
    # It holds all sums here.
    "bfloat16": CompressedAllReduce,
    "float16": lambda: CompressedAllReduce(wire_dtype="float16", prescale=0.5),
}


@pytest.mark.parametrize(
    ("strategy", "kind", "mesh", "axes", "cuts"),
    [
        *(("fused", kind, *case) for kind in KINDS for case in CASES),
        *(
            (strategy, kind, *case)
            for strategy in list(STRATEGIES)[1:]
            for kind, case in zip(KINDS, CASES)
        ),
    ],
)
def test_parts_of_sums_and_back(strategy, kind, mesh, axes, cuts, monkeypatch):
    shape = mtf.convert_to_shape(on_mesh.MESHES[mesh])
    rng = np.random.RandomState(0)
    # Whole numbers: their sums are exact in any order.
    arrays = [rng.randint(-9, 9, (shape.size, *s)).astype("f") for s in SHAPES]
    if kind == "own memories":
        monkeypatch.setattr(devices, "_memory", lambda device: device)
    # The first tensor takes the path of large ones.
    monkeypatch.setattr("mtf_gradsync.reduce.parts._WRITTEN_IN_PLACE", 1000)

    def make(mesh_impl, values):
        all_processors = ProcessorGroups.along(mesh_impl, axes)
        parts = STRATEGIES[strategy]().reduce_scatter(mesh_impl, values, all_processors, cuts)
        return [*parts, *all_gather(mesh_impl, parts, cuts, 2**20)]

    where = "simd" if kind == "simd" else "placement"
    results = on_mesh.run(where, on_mesh.MESHES[mesh], arrays, make)
    parts, wholes = results[: len(SHAPES)], results[len(SHAPES) :]
    for array, cut, part, whole in zip(arrays, cuts, parts, wholes):
        for p in range(shape.size):
            at = mtf.pnum_to_processor_coordinates(shape, p)
            group = [
                q
                for q in range(shape.size)
                if all(
                    a == b or i in axes
                    for i, (a, b) in enumerate(zip(at, mtf.pnum_to_processor_coordinates(shape, q)))
                )
            ]
            total = array[group].sum(0)
            expected = total
            for axis, tensor_axis in cut:
                expected = np.split(expected, shape.dims[axis].size, tensor_axis)[at[axis]]
            np.testing.assert_array_equal(part[p], expected)
            np.testing.assert_array_equal(whole[p], total)


@pytest.mark.parametrize(
    ("strategy", "cores", "dtype", "groups"),
    [
        ("best", 8, tf.float32, [[1, 8]]),
        ("bfloat16", 8, tf.bfloat16, [[1, 8]]),
        # The TPU compiler would make an all-reduce of one over 16 cores.
        ("fused", 16, tf.float32, [[2, 8], [8, 2]]),
    ],
)
def test_a_simd_mesh_is_sent_reduce_scatters_alone(strategy, cores, dtype, groups):
    with tf.Graph().as_default() as graph:
        with simd.tpu_program(f"all:{cores}", "") as program:
            impl = program.mesh_impl
            values = [impl.LaidOutTensor([tf.ones([16, 1024])])]
            all_processors = ProcessorGroups.along(impl, [0])
            STRATEGIES[strategy]().reduce_scatter(impl, values, all_processors, [[Cut(0, 0)]])
        sent = [op for op in graph.get_operations() if op.type in COLLECTIVES]
    assert [(op.type, op.inputs[0].dtype) for op in sent] == [("XlaReduceScatter", dtype)] * len(
        groups
    )
    assert [op.inputs[1].shape.as_list() for op in sent] == groups


def test_sixteen_cores_have_their_parts_in_order():
    """The last two tensors share a reduce-scatter."""
    shapes, cuts = [(3, 32, 2), (32, 64), (16, 3), (16, 3)], [1, 0, 0, 0]
    rng = np.random.RandomState(0)
    arrays = [rng.randint(-9, 9, (16, *s)).astype("f") for s in shapes]

    def make(impl, values):
        groups = ProcessorGroups.along(impl, [0])
        by_axis = [[Cut(0, axis)] for axis in cuts]
        parts = FusedAllReduce().reduce_scatter(impl, values, groups, by_axis)
        return [*parts, *all_gather(impl, parts, by_axis, 0)]

    results = on_mesh.run("simd", "all:16", arrays, make)
    for array, axis, parts, wholes in zip(arrays, cuts, results, results[len(shapes) :]):
        total = array.sum(0)
        np.testing.assert_array_equal(parts, np.split(total, 16, axis))
        np.testing.assert_array_equal(wholes, [total] * 16)


COLLECTIVES = ("CrossReplicaSum", "XlaReduceScatter", "XlaAllReduce", "AllToAll")


@pytest.mark.parametrize(("strategy", "size"), [("fused", 4), ("best", 4), ("bfloat16", 2)])
def test_devices_of_other_memories_send_parts_alone(strategy, size, monkeypatch):
    monkeypatch.setattr(devices, "_memory", lambda device: device)
    with on_mesh.graph_of("all:8", []) as (impl, values, graph):
        slices = []
        for device in impl.devices:
            with tf.device(device):
                slices.append(tf.placeholder(tf.float32, [8, 16]))
        values.append(impl.LaidOutTensor(slices))
        all_processors = ProcessorGroups.along(impl, [0])
        STRATEGIES[strategy]().reduce_scatter(impl, values, all_processors, [[Cut(0, 0)]])
        sent = {
            (x.name, op.device): x.shape.num_elements() * x.dtype.size
            for op in graph.get_operations()
            for x in op.inputs
            if x.device != op.device
        }
    # Each of 8 devices sends 7 parts of 16 numbers.
    assert sum(sent.values()) == 8 * 7 * 16 * size


def test_cpu_replicas_make_no_pass_over_gathered_values(monkeypatch):
    """What lets the TPU compiler write in place is in the program, and not in what they run."""
    monkeypatch.setattr("mtf_gradsync.reduce.parts._WRITTEN_IN_PLACE", 1)
    with tf.Graph().as_default() as graph:
        with simd.tpu_program("all:2", "") as program:
            impl = program.mesh_impl
            part = impl.LaidOutTensor([tf.ones([4])])
            all_gather(impl, [part], [[Cut(0, 0)]], 2**20)
        assert "SelectV2" in {op.type for op in graph.get_operations()}
        assert "SelectV2" not in {node.op for node in emulate(graph).graph_def.node}
