"""Groups of sums are packed for XLA's CPU devices, and are what they were."""

import re

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import reduce, simd, xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.reduce import ProcessorGroups
from mtf_gradsync.reduce.parts import Cut, all_gather, reduce_scatter
from mtf_gradsync.runtimes.xla.executable import Cache, lowered
from mtf_gradsync.runtimes.xla.replica_program import replica_program
from mtf_gradsync.runtimes.xla.runner.combiner import combined_for_cpus

pytestmark = pytest.mark.xla
SIZES = (3, 3, 5)


def counts(program, fetches, *operations):
    """How many of some collectives a program has, and how many when it is packed."""
    module = lowered(replica_program(program, fetches), Cache(None)).module
    return [
        [len(re.findall(rf'"stablehlo\.{operation}"', text)) for operation in operations]
        for text in (module, combined_for_cpus(module))
    ]


@pytest.mark.parametrize(("bucket_bytes", "packed"), [(None, 1), (0, len(SIZES))])
def test_a_group_is_one_sum_and_single_sums_stay(bucket_bytes, packed):
    with tf.Graph().as_default():
        batch = mtf.Dimension("batch", 4)
        # Whole numbers: exact in any order.
        values = [np.arange(4 * n, dtype=np.float32).reshape(4, n) for n in SIZES]
        with simd.tpu_program("all:4", "batch:all") as program:
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            given = [
                mtf.import_tf_tensor(
                    mesh, v, mtf.Shape([batch, mtf.Dimension(f"d{i}", v.shape[1])])
                )
                for i, v in enumerate(values)
            ]
            grads = [mtf.reduce_sum(x, reduced_dim=batch) for x in given]
            sums = gs.sum_shards(grads, reducer=gs.FusedAllReduce(bucket_bytes))
            lowering = mtf.Lowering(mesh.graph, {mesh: program.mesh_impl})
            fetches = [lowering.export_to_tf_tensor(s) for s in sums]
        assert counts(program, fetches, "all_reduce") == [[len(SIZES)], [packed]]
        with xla.session(program, lowering) as session:
            for found, value in zip(session.run(fetches), values):
                np.testing.assert_array_equal(found, value.sum(0))


def whole_numbers(shapes):
    """For each shape the values of 8 cores; their sums are exact in any order."""
    rng = np.random.RandomState(0)
    return [rng.randint(-9, 9, (8, *shape)).astype("f") for shape in shapes]


def on_cores(impl, values):
    core = impl.laid_out_pnum().tensor_list[0]
    return [impl.LaidOutTensor([tf.gather(tf.constant(v), core)]) for v in values]


@pytest.mark.parametrize(("shards", "levels"), [(1, 2), (2, 3)])
def test_each_level_of_hierarchical_sums_is_one_sum(shards, levels):
    """The third level has the cores of the first, and depends on it."""
    shapes = [(), (3,), (5, 7), (3,), (64, 4)]
    values = whole_numbers(shapes)
    with tf.Graph().as_default():
        with simd.tpu_program("rows:4;cols:2", "") as program:
            impl = program.mesh_impl
            given = on_cores(impl, values)
            strategy = reduce.HierarchicalAllReduce(("add_n/add_n", shards))
            sums = strategy.all_reduce(impl, given, ProcessorGroups.along(impl, [0, 1]))
            fetches = [x.tensor_list[0] for x in sums]
        rows = simd.list_collectives(program).rows
        # A scalar is not cut.
        separate = 2 * len(shapes) + (levels - 2) * (len(shapes) - 1)
        assert len(rows) == separate
        assert len({row.together for row in rows} - {""}) == levels
        assert counts(program, fetches, "all_reduce") == [[separate], [levels]]
        with xla.session(program) as session:
            for found, value in zip(session.run(fetches), values):
                np.testing.assert_array_equal(found, value.sum(0))


def test_sums_of_parts_over_other_axes_are_a_group():
    """Each column of cores cuts its sums, and parts are then summed over the rows."""
    shapes = [(8, 600), (8, 3), (4, 600)]
    values = whole_numbers(shapes)
    with tf.Graph().as_default():
        with simd.tpu_program("rows:4;cols:2", "batch:rows") as program:
            impl = program.mesh_impl
            given = on_cores(impl, values)
            groups = ProcessorGroups.along(impl, [0, 1])
            parts = reduce_scatter(impl, given, groups, [[Cut(0, 0)]] * len(shapes), 0)
            fetches = [x.tensor_list[0] for x in parts]
        rows = simd.list_collectives(program).rows
        assert len({row.together for row in rows} - {""}) == 2
        found = counts(program, fetches, "reduce_scatter", "all_reduce")
        assert found == [[len(shapes)] * 2, [1, 1]]
        with xla.session(program) as session:
            for part, value in zip(session.run(fetches), values):
                np.testing.assert_array_equal(part, np.split(value.sum(0), 4)[0])


def test_parts_of_a_group_are_scattered_and_gathered_at_once():
    """Cut along other axes of other shapes, on some of the cores, in the order of the group."""
    shapes, axes = [(8, 600), (1100, 8), (4, 600), (8, 3)], [0, 1, 0, 0]
    values = whole_numbers(shapes)
    cuts = [[Cut(0, axis)] for axis in axes]
    with tf.Graph().as_default():
        with simd.tpu_program("rows:4;cols:2", "batch:rows") as program:
            impl = program.mesh_impl
            given = on_cores(impl, values)
            groups = ProcessorGroups.along(impl, [0])
            parts = reduce_scatter(impl, given, groups, cuts, 0)
            wholes = all_gather(impl, parts, cuts, 0)
            fetches = [x.tensor_list[0] for x in [*parts, *wholes]]
        found = counts(program, fetches, "reduce_scatter", "all_gather")
        assert found == [[len(shapes)] * 2, [1, 1]]
        with xla.session(program) as session:
            found = session.run(fetches)
        # What is fetched is that of core 0, which sums with those of its column.
        for value, axis, part, whole in zip(values, axes, found, found[len(shapes) :]):
            total = value[::2].sum(0)
            np.testing.assert_array_equal(part, np.split(total, 4, axis)[0])
            np.testing.assert_array_equal(whole, total)
