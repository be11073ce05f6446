"""What every strategy must do, on every mesh and over every set of mesh axes."""

import numpy as np
import pytest

from mtf_gradsync import reduce, simd
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness
from tests.reduce import on_mesh
from tests.reduce.every_strategy import GROUPS, SHAPES, STRATEGIES, UNIT, arrays, check

# On SIMD meshes strategies differ in their packs alone.
ON_MESHES = [
    *(("placement", name) for name in STRATEGIES),
    *(("simd", name) for name in ("fused", "packs", "sharded_levels", "quantized", "collective_3")),
]


@pytest.mark.parametrize(("mesh_kind", "strategy"), ON_MESHES, indirect=["mesh_kind"])
@pytest.mark.mostly_slow(every=5)
def test_sums_equal_float64_and_replicas_agree(mesh_kind, strategy):
    """On a mesh that has all kinds of sets of axes that other meshes of 8 have."""
    mesh_shape, data = on_mesh.MESHES["2x2x2"], arrays()
    subsets = on_mesh.subsets(mesh_shape)
    # All shapes over one, two and all axes and over odd groups; some over the other sets.
    all_shapes = {subsets[0], subsets[4], subsets[-1]}
    summed = []

    def make(impl, values):
        results = []
        for axes in [*subsets, None]:
            groups = reduce.ProcessorGroups(GROUPS)
            if axes is not None:
                groups = reduce.ProcessorGroups.along(impl, axes)
            some = slice(None) if axes is None or axes in all_shapes else slice(2, 5)
            summed.append((groups.groups, some))
            results += STRATEGIES[strategy]().all_reduce(impl, values[some], groups)
        return results

    out = iter(on_mesh.run(mesh_kind, mesh_shape, data, make))
    for groups, some in summed:
        found = [next(out) for _ in data[some]]
        check(mesh_kind, mesh_shape, data[some], found, groups, UNIT["float32"])
    assert next(out, None) is None


@pytest.mark.parametrize(("mesh_kind", "strategy"), ON_MESHES)
@pytest.mark.mostly_slow(every=3)
def test_dtypes_together(mesh_kind, strategy):
    by_dtype = {dtype: arrays(dtype)[:4] for dtype in UNIT}
    by_dtype["int32"] = [x.astype(np.int32) for x in arrays()[:4]]
    data = [x for several in zip(*by_dtype.values()) for x in several]

    sums = on_mesh.sums(STRATEGIES[strategy](), [0, 1])
    out = on_mesh.run(mesh_kind, "rows:4;cols:2", data, sums)
    groups = [list(range(8))]
    for x, result in zip(data, out):
        dtype = tf.as_dtype(x.dtype).name
        unit = UNIT.get(dtype, 0.0)
        if mesh_kind == "simd" and dtype == "float64":
            unit = UNIT["float32"] * 1.01
        check(mesh_kind, "rows:4;cols:2", [x], [result], groups, unit)


@pytest.mark.parametrize(
    "make",
    [
        reduce.CollectiveAllReduce,
        lambda: reduce.AllReduce(num_packs=0),
        *map(STRATEGIES.get, ("fused", "one_device", "ring", "best", "levels")),
    ],
)
def test_sums_that_nothing_packs_are_one_group_of_a_simd_mesh(make):
    with tf.Graph().as_default():
        with simd.tpu_program("rows:2;cols:2", "") as program:
            impl = program.mesh_impl
            values = [impl.LaidOutTensor([tf.zeros(shape)]) for shape in SHAPES]
            on_mesh.sums(make())(impl, values)
        rows = simd.list_collectives(program).rows
    assert len(rows) == sum(0 not in shape for shape in SHAPES)
    assert len({row.together for row in rows} - {""}) == 1
    assert all(row.together for row in rows)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_twenty_runs_give_the_same_bits_and_copies_of_a_tensor_stay_copies(strategy):
    """Groups that hold the same add it up in the same order, whoever does the work."""
    copies = [np.repeat(x[:4], 2, axis=0) for x in arrays()]

    def make(impl, values):
        made = []
        for some, axes in ((values[len(copies) :], [0, 1]), (values[: len(copies)], [0])):
            made += on_mesh.sums(STRATEGIES[strategy](), axes)(impl, some)
        return made

    given = [*copies, *arrays()]
    first, *others = on_mesh.run("placement", "rows:4;cols:2", given, make, runs=20)
    for other in others:
        assert [x.tobytes() for x in other] == [x.tobytes() for x in first]
    for out in first[-len(copies) :]:
        assert len({x.tobytes() for x in out}) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_of_one_change_nothing(strategy):
    with on_mesh.graph_of("rows:8;one:1", [(3,), ()]) as (impl, values, graph):
        before = len(graph.get_operations())
        assert on_mesh.sums(STRATEGIES[strategy](), [1])(impl, values) == values
        assert len(graph.get_operations()) == before


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_values(strategy):
    with on_mesh.graph_of("all:8", []) as (impl, values, _):
        assert on_mesh.sums(STRATEGIES[strategy]())(impl, values) == []


@pytest.mark.parametrize("strategy", ["fused", "packs", "ring"])
def test_shuffled_cores(strategy):
    data = arrays()
    groups = [mtf.processor_groups(mtf.convert_to_shape("rows:4;cols:2"), [0]), GROUPS]

    def make(impl, values):
        mine = STRATEGIES[strategy]()
        some = on_mesh.sums(mine)(impl, values)
        return some + on_mesh.sums(mine, groups=GROUPS)(impl, values)

    out = on_mesh.run("simd", "rows:4;cols:2", data, make, logical_to_physical=harness.SHUFFLED)
    for some, number in ((out[: len(data)], 0), (out[len(data) :], 1)):
        check("simd", "rows:4;cols:2", data, some, groups[number], UNIT["float32"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_has_no_sum_is_refused_before_anything_is_built(strategy):
    with on_mesh.graph_of("all:8", [(3,)]) as (impl, values, graph):
        groups = reduce.ProcessorGroups.along(impl, [0])
        slices = tf.IndexedSlices(values=tf.ones([1, 3]), indices=tf.zeros([1], tf.int32))
        bad = {
            "IndexedSlices.*dense": impl.LaidOutTensor([slices] * 8),
            "shape.*unknown": impl.LaidOutTensor([tf.placeholder(tf.float32, [None, 3])] * 8),
            "shape of values.1. is unknown": impl.LaidOutTensor([tf.placeholder(tf.float32)] * 8),
            "dtype bool": impl.LaidOutTensor([tf.placeholder(tf.bool, [3])] * 8),
            "LaidOutTensor": values[0].tensor_list[0],
        }
        before = len(graph.get_operations())
        for message, value in bad.items():
            with pytest.raises(ValueError, match=message):
                STRATEGIES[strategy]().all_reduce(impl, [values[0], value], groups)
        assert len(graph.get_operations()) == before


def test_a_strategy_may_get_its_constructor_from_another_base_class():
    class Settings:
        def __init__(self, size):
            self.size = size

    class Own(reduce.Strategy, Settings):
        def all_reduce(self, mesh_impl, values, groups):
            return list(values)

    assert Own(3).size == 3
