"""Groups of processors, and what strategies check before they build anything."""

import pytest

from mtf_gradsync import reduce
from mtf_gradsync._private.libraries import tf
from tests import harness
from tests.reduce import on_mesh

MESH = "rows:4;cols:2"
SUM = tf.VariableAggregation.SUM
STRATEGIES = {
    "fused": lambda: reduce.FusedAllReduce(),
    "packs": lambda: reduce.AllReduce(num_packs=3),
    "ring": lambda: reduce.RingAllReduce(),
    "levels": lambda: reduce.HierarchicalAllReduce(),
    "collective": lambda: reduce.CollectiveAllReduce(),
    "compressed": lambda: reduce.CompressedAllReduce(),
    "best": lambda: reduce.BestAllReduce(),
    "one device": lambda: reduce.ReductionToOneDevice(),
}


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [[]],
        None,
        3,
        [3],
        [["a"]],
        [[0, 1, 2], [3, 4]],
        [[0, 0, 1], [2, 3, 4]],
        [[0, 1], [2, 9]],
        [[1, 2], [3, 4]],
    ],
)
def test_what_is_no_partition_is_refused(groups):
    with pytest.raises(ValueError, match="groups must be equally long lists"):
        reduce.ProcessorGroups(groups)


def test_axes_by_number_and_name():
    with on_mesh.graph_of(MESH, []) as (impl, _, _):
        by_name = reduce.ProcessorGroups.along(impl, ["cols", "rows"])
        assert by_name.mesh_axes == (0, 1)
        assert by_name.group_size == 8
        # Once taken for an axis that nothing differs along: groups of one, and no sum at all.
        for axes in ([2], [-1], ["depth"], [True], [None]):
            with pytest.raises(ValueError, match=r"mesh_axes.*rows=4, cols=2.*0 to 1"):
                reduce.ProcessorGroups.along(impl, axes)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_that_do_not_fit_are_refused_before_anything_is_built(strategy):
    mine = STRATEGIES[strategy]()
    with on_mesh.graph_of(MESH, [(3,), ()]) as (impl, values, graph):
        before = len(graph.get_operations())
        fitting = reduce.ProcessorGroups.along(impl, [0])
        for mesh_impl, groups, error, message in [
            (impl, reduce.ProcessorGroups([[0, 1]]), ValueError, r"groups must hold the 8.*got 2"),
            (impl, [[0, 1], [2, 3]], TypeError, "groups must be ProcessorGroups"),
            (None, fitting, TypeError, "mesh_impl must be"),
            (MESH, fitting, TypeError, "mesh_impl must be"),
        ]:
            with pytest.raises(error, match=message):
                mine.all_reduce(mesh_impl, values, groups)
            with pytest.raises(error, match=message):
                mine.reduce(mesh_impl, SUM, values[0], values[0], groups)
        with pytest.raises(TypeError, match="mesh_impl must be"):
            mine.broadcast(None, values[0].tensor_list[0], "/device:CPU:0")
        assert len(graph.get_operations()) == before


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("packs", [0, 2])
@pytest.mark.parametrize(
    ("spec", "outer_axes"),
    [("add_n", "depth"), ("add_n/add_n", ["rows", "depth"]), ("add_n", [2]), ("add_n/add_n", [-1])],
)
def test_an_outer_axis_that_the_mesh_has_not_is_refused_before_anything_is_built(
    spec, outer_axes, packs, compressed
):
    strategy = reduce.HierarchicalAllReduce(spec, num_packs=packs, outer_axes=outer_axes)
    if compressed:
        strategy = reduce.CompressedAllReduce(strategy)
    with on_mesh.graph_of(MESH, [(3,), ()]) as (impl, values, _):
        with harness.unchanged(), pytest.raises(ValueError, match="outer_axes"):
            on_mesh.sums(strategy)(impl, values)


def test_slices_that_differ_are_refused_before_anything_is_built():
    with on_mesh.graph_of(MESH, [(3,), (4,)]) as (impl, values, graph):
        one, other = (x.tensor_list for x in values)
        half = [tf.placeholder(tf.float16, [3])] * 4
        before = len(graph.get_operations())
        for slices in (one[:4] + other[:4], one[:4] + half):
            with pytest.raises(ValueError, match=r"slices of values.0. must have one dtype"):
                reduce.FusedAllReduce().all_reduce(
                    impl,
                    [impl.LaidOutTensor(slices), values[0]],
                    reduce.ProcessorGroups.along(impl, [0]),
                )
        assert len(graph.get_operations()) == before


class OneMethod:
    """A strategy that is none of the package's classes."""

    def all_reduce(self, mesh_impl, values, groups):
        return reduce.FusedAllReduce().all_reduce(mesh_impl, values, groups)


def test_a_strategy_of_one_method_can_be_compressed_twice():
    with on_mesh.graph_of(MESH, [(3,)]) as (impl, values, graph):
        inner = reduce.CompressedAllReduce(OneMethod(), None)
        outer = reduce.CompressedAllReduce(inner, "float16")
        groups = reduce.ProcessorGroups.along(impl, [0])
        assert outer.wire_dtype(impl, tf.float32, groups) == tf.float16
        outer.all_reduce(impl, values, groups)
        added = {
            op.outputs[0].dtype for op in graph.get_operations() if op.type in ("AddN", "Cast")
        }
    assert tf.float16 in added


def test_a_device_off_the_mesh_is_refused_before_anything_is_built():
    mesh_impl = harness.placement("all:2", "batch:all")
    groups = reduce.ProcessorGroups.along(mesh_impl, [0])
    with tf.Graph().as_default() as graph:
        x = mesh_impl.LaidOutTensor([tf.ones([2])] * 2)
        before = len(graph.get_operations())
        for wrap in (lambda inner: inner, reduce.CompressedAllReduce):
            strategy = wrap(reduce.ReductionToOneDevice("/device:CPU:5"))
            words = r"reduce_to_device must be on the mesh.*CPU:5.*CPU:0.*CPU:1"
            with pytest.raises(ValueError, match=words):
                strategy.all_reduce(mesh_impl, [x], groups)
        assert len(graph.get_operations()) == before


def test_a_device_is_known_by_its_long_name_too():
    mesh_impl = harness.placement("all:2", "batch:all")
    strategy = reduce.ReductionToOneDevice("/job:localhost/replica:0/task:0/device:CPU:1")
    strategy.check(mesh_impl, reduce.ProcessorGroups.along(mesh_impl, [0]))
