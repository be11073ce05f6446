"""CompressedAllReduce: what is sent, how far off sums are, and what float16 cannot hold."""

import numpy as np
import pytest

from benchmarks import models
from mtf_gradsync import reduce, session_config, simd
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.reduce.parts import Cut
from tests.reduce import on_mesh

U = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
V = 2.0**-24
# The smallest number above 0; bfloat16's subnormals may become 0.
TINY = {"bfloat16": 2.0**-126, "float16": 2.0**-24}
WIRES = sorted(U)
MESH = "rows:4;cols:2"
STRATEGIES = {
    "fused": (lambda: reduce.FusedAllReduce(), 1),
    "packs": (lambda: reduce.AllReduce(num_packs=3), 1),
    "levels": (lambda: reduce.HierarchicalAllReduce(("add_n/add_n", 2)), 2),
}
EACH_TWICE = ["fused", "fused", "packs", "packs", "levels", "levels"]


def bound(x, groups, wire, prescale=1.0, levels=1):
    """The bound that CompressedAllReduce documents, for each processor."""
    n = len(groups[0])
    size = on_mesh.expected("", np.abs(x.astype(float)), groups)
    relative = (1 + U[wire]) ** (levels + 1) * (1 + V) ** (n + 1) - 1
    return relative * size + (levels * n + 1) * TINY[wire] / prescale


def warnings_in(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "mtf_gradsync"]


def adversarial():
    """Sums that cancel, sizes that differ, numbers between two of the wire dtype's."""
    rng = np.random.RandomState(0)
    x = rng.randn(8, 400)
    cancelling = np.concatenate([x[:4], -x[:4] * (1 + 2.0**-7)])
    sizes = x * 10.0 ** rng.randint(-7, 4, [8, 400])
    halfway = np.broadcast_to(1 + 2.0 ** -np.arange(4, 20), [8, 16]) * np.sign(x[:, :16])
    one_large = np.where(np.arange(8)[:, None] == 3, 30000, 2.0**-9) * np.ones([8, 5])
    return [a.astype("f") for a in (x, cancelling, sizes, halfway, one_large, x[:, 0])]


@pytest.mark.parametrize(
    ("wire", "strategy", "prescale"),
    [
        # Every two of the three together.
        *zip(3 * WIRES, EACH_TWICE, [1 / 64, 1.9, 1 / 64, 1.9, 1.9, 1 / 64]),
    ],
)
@pytest.mark.mostly_slow
def test_adversarial_numbers_stay_within_the_bound(wire, prescale, strategy):
    data = adversarial() + [adversarial()[0].astype(np.float64)]
    make_reducer, levels = STRATEGIES[strategy]
    subsets = [(1,), (0, 1)]  # the smallest groups, and the largest, which levels cut

    def make(impl, values):
        compressed = reduce.CompressedAllReduce(make_reducer(), wire, prescale)
        return [y for axes in subsets for y in on_mesh.sums(compressed, axes)(impl, values)]

    out = iter(on_mesh.run("placement", MESH, data, make))
    worst = 0.0
    for axes in subsets:
        groups = mtf.processor_groups(mtf.convert_to_shape(MESH), list(axes))
        for x in data:
            y = next(out)
            assert y.dtype == x.dtype
            error = np.abs(y - on_mesh.expected(MESH, x, groups))
            limit = bound(x, groups, wire, prescale, levels if len(axes) == 2 else 1)
            assert (error <= limit).all()
            worst = max(worst, (error / limit).max())
            for group in groups:
                assert len({y[p].tobytes() for p in group}) == 1
    # The bound is one that these numbers come near.
    assert worst > 0.4


def test_twenty_runs_give_the_same_bits():
    strategy = reduce.CompressedAllReduce(wire_dtype="float16", prescale=3.0)
    first, *others = on_mesh.run(
        "placement", MESH, adversarial(), on_mesh.sums(strategy, [0, 1]), runs=20
    )
    for other in others:
        assert [x.tobytes() for x in other] == [x.tobytes() for x in first]


@pytest.fixture(scope="module")
def lm_gradients():
    """What each processor has of each gradient of a small transformer, on a mesh of 4x2."""
    pytest.importorskip("tensorflow_datasets", reason="the transformer needs the extra 'train'")
    model = models.lm(layers=1, d_model=32, length=16)
    program = models.build(model, models.FLOOR)
    pending = [program.lowering.tensors[g] for g in program.grads]
    pending = [x for x in pending if isinstance(x, mtf.LazyAllreduceSum)]
    assert len(pending) > 5
    assert {tuple(x.mesh_axes) for x in pending} == {(0,)}
    slices = [x.laid_out_input.to_laid_out_tensor().tensor_list for x in pending]
    with tf.Session(graph=program.graph, config=session_config(num_cpu_devices=8)) as session:
        with program.graph.as_default():
            init = tf.global_variables_initializer()
            to_slices = program.lowering.copy_masters_to_slices()
        session.run(init)
        session.run(to_slices)
        return [np.stack(x) for x in session.run(slices, {program.x: model.batch})]


# What a strategy makes of the bound is above.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire", "strategy", "prescale"), [("bfloat16", "levels", 1.0), ("float16", "packs", 1024.0)]
)
def test_gradients_of_a_language_model_stay_within_the_bound(
    lm_gradients, wire, prescale, strategy
):
    groups = mtf.processor_groups(mtf.convert_to_shape(MESH), [0])
    compressed = reduce.CompressedAllReduce(STRATEGIES[strategy][0](), wire, prescale)
    out = on_mesh.run("placement", MESH, lm_gradients, on_mesh.sums(compressed))
    for x, y in zip(lm_gradients, out):
        error = np.abs(y - on_mesh.expected(MESH, x, groups))
        assert (error <= bound(x, groups, wire, prescale)).all()
        for group in groups:
            assert len({y[p].tobytes() for p in group}) == 1


@pytest.mark.slow
def test_prescale_brings_small_gradients_into_float16_s_range(lm_gradients):
    groups = mtf.processor_groups(mtf.convert_to_shape(MESH), [0])
    small = [x / 1024 for x in lm_gradients]
    errors = {}
    for prescale in (1.0, 4096.0):
        strategy = reduce.CompressedAllReduce(wire_dtype="float16", prescale=prescale)
        out = on_mesh.run("placement", MESH, small, on_mesh.sums(strategy))
        errors[prescale] = np.mean(
            [np.abs(y - on_mesh.expected(MESH, x, groups)).mean() for x, y in zip(small, out)]
        )
    assert errors[4096.0] < errors[1.0] / 10


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_that_is_sent_is_narrow(wire, strategy):
    compressed = reduce.CompressedAllReduce(STRATEGIES[strategy][0](), wire)
    with on_mesh.graph_of(MESH, [], tf.float32) as (impl, values, graph):
        for shape in [(3,), (50,), (2, 5)]:
            slices = []
            for device in impl.devices:
                with tf.device(device):
                    slices.append(tf.placeholder(tf.float32, shape))
            values.append(impl.LaidOutTensor(slices))
        on_mesh.sums(compressed, [0, 1])(impl, values)
        sent = {
            x.dtype.name
            for op in graph.get_operations()
            for x in op.inputs
            if x.device != op.device and x.dtype.is_floating
        }
        groups = reduce.ProcessorGroups.along(impl, [0, 1])
        assert compressed.wire_dtype(impl, tf.float32, groups).name == wire
    assert sent == {wire}


def test_simd_sends_bfloat16_where_mesh_tf_does():
    x = adversarial()[0]
    strategy = reduce.CompressedAllReduce()
    (out,) = on_mesh.run("simd", MESH, [x], on_mesh.sums(strategy, [0, 1]))
    # Each of the 7 additions may round, as well as the way in.
    size = np.abs(x.astype(float)).sum(0)
    assert (np.abs(out - x.sum(0, dtype=float)) <= ((1 + U["bfloat16"]) ** 9 - 1) * size).all()
    assert len({y.tobytes() for y in out}) == 1
    with tf.Graph().as_default() as graph:
        with simd.tpu_program(MESH, "") as program:
            impl = program.mesh_impl
            on_mesh.sums(strategy, [0, 1])(impl, [impl.LaidOutTensor([tf.ones([3])])])
        dtypes = [
            op.inputs[0].dtype for op in graph.get_operations() if op.type == "CrossReplicaSum"
        ]
    assert dtypes == [tf.bfloat16]


LARGE_GROUPS = [list(range(0, 8, 2)), list(range(1, 8, 2))]


@pytest.mark.parametrize(
    ("kind", "strategy", "wire", "groups"),
    [
        ("simd", reduce.FusedAllReduce, "float16", None),
        ("simd", reduce.FusedAllReduce, "bfloat16", LARGE_GROUPS),
        ("simd", reduce.HierarchicalAllReduce, "float16", None),
        ("placement", reduce.RingAllReduce, "bfloat16", None),
        ("placement", lambda: reduce.AllReduce("ring"), "float16", None),
    ],
)
def test_where_nothing_is_saved_values_go_as_they_are_with_one_warning(
    kind, strategy, wire, groups, caplog
):
    def make(impl, values):
        plain, compressed = strategy(), reduce.CompressedAllReduce(strategy(), wire)
        every = (plain, compressed, compressed)
        return [y for s in every for y in on_mesh.sums(s, groups=groups)(impl, values)]

    plain, once, twice = on_mesh.run(kind, "all:8", adversarial()[:1], make)
    assert plain.tobytes() == once.tobytes() == twice.tobytes()
    (warning,) = warnings_in(caplog)
    assert f"wire_dtype='{wire}' has no effect" in warning


def test_simd_levels_of_few_cores_send_bfloat16(caplog):
    def make(impl, values):
        groups = reduce.ProcessorGroups.along(impl, [0, 1])
        flat, levels = reduce.FusedAllReduce(), reduce.HierarchicalAllReduce()
        assert flat.wire_dtype(impl, tf.bfloat16, groups) == tf.float32
        assert levels.wire_dtype(impl, tf.bfloat16, groups) == tf.bfloat16
        one = reduce.ProcessorGroups.along(mtf_impl_of("rows:16"), [0])
        assert levels.wire_dtype(mtf_impl_of("rows:16"), tf.bfloat16, one) == tf.float32
        return reduce.CompressedAllReduce(levels).all_reduce(impl, values, groups)

    def mtf_impl_of(mesh_shape):
        return mtf.simd_mesh_impl.SimdMeshImpl(
            mtf.convert_to_shape(mesh_shape), mtf.convert_to_layout_rules(""), [""] * 16
        )

    (out,) = on_mesh.run("simd", "rows:4;cols:4", [np.ones([16, 3], "f")], make)
    assert (out == 16).all()
    assert not warnings_in(caplog)


@pytest.mark.parametrize("wire", [None, *WIRES])
def test_other_dtypes_and_groups_of_one_are_left_alone(wire):
    x = adversarial()[0]
    data = [x.astype(np.int32), x.astype(tf.bfloat16.as_numpy_dtype), x.astype(np.float16)]

    def make(impl, values):
        results = []
        for strategy in (reduce.FusedAllReduce(), reduce.CompressedAllReduce(None, wire, 2.0)):
            results += on_mesh.sums(strategy)(impl, values[: 3 if wire else 4])
            results += on_mesh.sums(strategy, [1])(impl, values)
        return results

    out = on_mesh.run("placement", "all:8;one:1", [*data, x], make)
    half = len(out) // 2
    for plain, compressed in zip(out[:half], out[half:]):
        assert plain.tobytes() == compressed.tobytes()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.mostly_slow
def test_float16_overflow_is_said_and_kept(strategy, capfd):
    fine = np.ones([8, 5], "f")
    one_too_large, sum_too_large, both_signs, infinite = (fine.copy() for _ in range(4))
    one_too_large[2, 0] = 1e5
    sum_too_large[:, 1] = 3e4
    both_signs[:2, 2] = 1e5, -1e5
    infinite[3, 3] = np.inf
    compressed = reduce.CompressedAllReduce(STRATEGIES[strategy][0](), "float16")

    def run(*arrays):
        out = on_mesh.run("placement", MESH, list(arrays), on_mesh.sums(compressed, [0, 1]))
        return out, capfd.readouterr().err.count("float16 overflow")

    assert run(fine)[1] == 0
    (kept, _), said = run(one_too_large, fine)
    assert said == 1
    assert np.isinf(kept[:, 0]).all()
    (kept,), said = run(sum_too_large)
    assert said == 1
    assert np.isinf(kept[:, 1]).all()
    (kept,), said = run(both_signs)
    assert said == 1
    assert np.isnan(kept[:, 2]).all()
    # What was infinite before is no overflow.
    (kept,), said = run(infinite)
    assert said == 0
    assert np.isinf(kept[:, 3]).all()
    # A smaller prescale is the cure that the message names.
    compressed.prescale = 2.0**-6
    (kept,), said = run(sum_too_large)
    assert said == 0
    assert (kept[:, 1] == 24e4).all()


def test_overflow_is_said_of_parts_too(capfd):
    x = np.ones([8, 8], "f")
    x[:, 6] = 3e4  # in the part of one processor
    compressed = reduce.CompressedAllReduce(wire_dtype="float16")

    def make(impl, values):
        groups = reduce.ProcessorGroups.along(impl, [0])
        return compressed.reduce_scatter(impl, values, groups, [[Cut(0, 0)]])

    (out,) = on_mesh.run("placement", "all:8", [x], make)
    assert np.isinf(out).reshape(-1).tolist() == [p == 6 for p in range(8)]
    assert "overflow: 1 of 1 sums" in capfd.readouterr().err


def test_overflow_counts_sums_apart(capfd):
    x = np.ones([8, 5], "f")
    x[0, 0] = np.inf  # in the group of column 0, which says nothing about column 1
    x[1, 0] = 1e5
    strategy = reduce.CompressedAllReduce(wire_dtype="float16")
    on_mesh.run("placement", MESH, [x, np.ones([8], "f")], on_mesh.sums(strategy))
    assert "overflow: 1 of 4 sums" in capfd.readouterr().err


def test_only_float16_is_looked_at():
    for wire, looked in (("bfloat16", False), ("float16", True)):
        with on_mesh.graph_of(MESH, [(3,)]) as (impl, values, graph):
            on_mesh.sums(reduce.CompressedAllReduce(wire_dtype=wire), [0, 1])(impl, values)
            types = {op.type for op in graph.get_operations()}
        assert ("IsFinite" in types) == looked


@pytest.mark.parametrize("number", [np.float32, np.float64, np.int64, int])
def test_prescales_of_any_kind_of_number(number):
    assert reduce.CompressedAllReduce(prescale=number(8)).prescale == 8.0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wire", WIRES)
def test_what_is_not_finite_stays_so(wire, strategy):
    x = np.ones([8, 6], "f")
    x[2, 0], x[3, 1], x[4, 2] = np.nan, np.inf, -np.inf
    x[0, 3], x[7, 3] = np.inf, -np.inf
    compressed = reduce.CompressedAllReduce(STRATEGIES[strategy][0](), wire, 0.5)
    (out,) = on_mesh.run("placement", MESH, [x], on_mesh.sums(compressed, [0, 1]))
    want = np.array([np.nan, np.inf, -np.inf, np.nan, 8, 8], "f")
    np.testing.assert_array_equal(out, np.broadcast_to(want, [8, 6]))
