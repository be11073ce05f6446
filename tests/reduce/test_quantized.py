"""Gradients as blocks of whole numbers: as numpy's, on all runtimes, and what is sent."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import reduce, simd, xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.reduce.quantized import QuantizationErrors
from tests.optimizers.pipeline.rounded_programs import Program
from tests.reduce import compressed, on_mesh
from tests.reduce.quantized_reference import FEEDS, SIZE, STEPS, Reference

KINDS = ["placement", "shared", "simd"] + ([] if xla.why_no_xla() else ["xla"])


def optimizer(**settings):
    strategy = reduce.QuantizedAllReduce(block_size=SIZE, **settings)

    def make(mesh):
        sgd = mtf.optimize.SgdOptimizer(compressed.RATE)
        return gs.CrossShardOptimizer(sgd, reducer=strategy, **mesh)

    return make


def program(kind, mesh, make, **more):
    return Program(kind, mesh, make, loss=compressed.loss, feed=FEEDS[0], **more)


@pytest.fixture(scope="module")
def programs():
    made = {}

    def get(kind, mesh):
        if (kind, mesh) not in made:
            made[kind, mesh] = program(kind, mesh, optimizer(), reported=True)
        return made[kind, mesh]

    return get


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_fifty_steps_are_numpy_s_to_the_bit_and_so_is_a_restart(kind, programs, tmp_path):
    reference = Reference("2x2")
    for feed in FEEDS:
        reference.step(feed)
    assert reference.errors["w"].any()
    made, halfway = programs(kind, "2x2"), str(tmp_path / "halfway")
    reference.check(made.run(FEEDS))
    made.run(FEEDS[:25], save=halfway)
    found = made.run(FEEDS[25:], restore=halfway)
    reference.check(found)
    # What was applied and what waits is the sum of all gradients: both are rounded 50 times.
    total = sum(compressed.gradients(feed, 1)["w"][0] for feed in FEEDS)
    applied = -found["w"] / compressed.RATE
    waits = reference.errors["w"].astype(float).sum(0)
    eps = 2 * STEPS * np.finfo(np.float32).eps
    assert np.abs(applied + waits - total).max() <= eps * np.abs(total).max()


@pytest.mark.slow
def test_it_moves_between_meshes_and_runtimes_with_the_sum_of_what_was_not_sent(programs, tmp_path):
    """On "2x2" a slice of b is too small to be sent in blocks: what waits is sent as it is."""
    reference, path = Reference("4"), None
    stations = zip(["4", "2x2", "one", "4"], ["simd", "placement", "placement", KINDS[-1]])
    for number, (mesh, kind) in enumerate(stations):
        reference.move(mesh)
        feeds, before = FEEDS[5 * number :][:5], path
        path = str(tmp_path / f"{number}")
        for feed in feeds:
            reference.step(feed)
        assert [reference.pays(k) for k in ("w", "b")] == [True, mesh != "2x2"]
        reference.check(programs(kind, mesh).run(feeds, restore=before, save=path))


@pytest.mark.parametrize("kind", KINDS[2:])
@pytest.mark.mostly_slow
def test_four_bits_and_no_feedback(kind):
    four, rounded = Reference("2x2", bits=4), Reference("2x2", feedback=False)
    for feed in FEEDS[:5]:
        four.step(feed)
        rounded.step(feed)
    four.check(program(kind, "2x2", optimizer(bits=4)).run(FEEDS[:5]))
    found = program(kind, "2x2", optimizer(error_feedback=False)).run(FEEDS[:5])
    assert "w/quantization_error" not in found
    np.testing.assert_array_equal(found["w"], rounded.values["w"])


def test_processors_of_one_memory_that_have_the_same_send_it_once():
    devices = [f"/device:CPU:{i}" for i in range(4)]
    parts = [np.random.RandomState(i).randn(24, 20).astype("f") for i in range(2)]
    with tf.Graph().as_default() as graph:
        impl = gs.placement_mesh_impl("rows:2;cols:2", "", devices)
        first, second = map(tf.constant, parts)
        value = impl.LaidOutTensor([first, first, second, second])
        groups = reduce.ProcessorGroups.along(impl, [0])
        strategy, state = gs.QuantizedAllReduce(block_size=SIZE), QuantizationErrors((None,))
        (total,), _ = strategy.reduce_gradients(impl, [value], groups, state)
        cast = [op for op in graph.get_operations() if op.type == "Cast"]
        with tf.Session(config=gs.session_config(num_cpu_devices=4)) as session:
            found = session.run(total.tensor_list)
    # Each of the two rows' own blocks, and each of the two parts of the sum.
    assert len([op for op in cast if op.outputs[0].dtype == tf.int8]) == 4
    ((expected, _),) = compressed.quantized_sums([np.stack(parts)], 8, SIZE)
    for one in found:
        np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_found_and_nothing_of_it_kept(kind, programs):
    feeds = [FEEDS[0], {k: x.copy() for k, x in FEEDS[1].items()}]
    feeds[1]["x"][0, 3] = np.inf
    found = programs(kind, "2x2").run(feeds)
    # An infinity in a row of 20 numbers of one slice's blocks of 32.
    assert 10 <= np.isnan(found["w"]).sum() < found["w"].size
    assert np.isnan(found["w"][3]).all()
    assert np.isfinite(found["w/quantization_error"]).all()


def test_the_rate_is_reported(programs):
    (fetched,) = programs("simd", "2x2").fetches(FEEDS[:1])
    # A slice of w has 240 numbers in 8 blocks, b has 10, gain one.
    assert fetched["compression/rate"] == np.float32(4 * 251 / (8 * (SIZE + 2) + 4 * 11))
    assert fetched["compression/whole"] == 2


SHAPES = [(), (1,), (640,), (1031,), (64, 4), (0, 2), (2, 300)]


def run(kind, arrays, bits=8, size=64, feedback=True, dtype="float32", runs=1):
    """Sums over "rows" of 4 and what is not sent, of one array a processor."""
    strategy = reduce.QuantizedAllReduce(bits, size, feedback)
    given = [x.astype(tf.as_dtype(dtype).as_numpy_dtype) for x in arrays]
    errors = [np.zeros(x.shape, "f") for x in arrays]

    def make(impl, values):
        groups = reduce.ProcessorGroups.along(impl, [0])
        state = QuantizationErrors(tuple(values[len(given) :]))
        sums, state = strategy.reduce_gradients(impl, values[: len(given)], groups, state)
        return [*sums, *state.of]

    out = on_mesh.run(kind, "rows:4;cols:2", given + errors, make, runs=runs)
    return out if runs > 1 else (out[: len(given)], out[len(given) :])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.mostly_slow
def test_blocks_of_any_numbers(kind, bits):
    """Shapes that do not divide, together; zeros, huge and tiny numbers in some blocks."""
    rng = np.random.RandomState(1)
    arrays = [(rng.randn(8, *shape) * 3).astype("f") for shape in SHAPES]
    arrays[2][:, :64] = 0
    arrays[2][:, 64:128] *= np.float32(1e-44)
    arrays[2][:, 128:192] *= np.float32(3e36)
    arrays[2][:, 192:256] = np.finfo("f").max / 8
    arrays[2][:, 256:320] *= np.float32(1e-30)
    sums, errors = run(kind, arrays, bits)
    half = 0.5 / (2 ** (bits - 1) - 1) * (1 + 2.0**-7)
    for x, total, error in zip(arrays, sums, errors):
        parts, got, kept = (v.astype(float).reshape(4, 2, *v.shape[1:]) for v in (x, total, error))
        want = parts.sum(0)
        # Four roundings of sums, and one of each error, in float32.
        eps = 16 * np.finfo("f").eps * np.abs(parts).sum(0) + 2.0**-120
        assert (np.abs(got[0] + kept.sum(0) - want) <= eps).all()
        assert all((one == got[0]).all() for one in got)
        # Half a scale of each core and of the sum; a scale is that of the largest in a block.
        if x[0].size > 64:
            flat = [v.reshape(4, 2, -1)[..., : v[0].size // 64 * 64] for v in (x, total)]
            blocks, found = (v.astype(float).reshape(4, 2, -1, 64) for v in flat)
            limit = half * (np.abs(blocks).max(-1).sum(0) + np.abs(found[0]).max(-1))
            off = np.abs(found[0] - blocks.sum(0)).max(-1)
            assert (off <= limit * 1.01 + 2.0**-98).all()
        else:
            assert not kept.any()


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.mostly_slow
def test_narrow_gradients_and_repeats(kind):
    arrays = [np.random.RandomState(2).randn(8, 640) * 3]
    sums, errors = run(kind, arrays, dtype="bfloat16")
    assert sums[0].dtype == tf.bfloat16.as_numpy_dtype
    x = arrays[0].astype(tf.bfloat16.as_numpy_dtype).astype(float).reshape(4, 2, 640)
    got = sums[0].astype(float).reshape(4, 2, 640)[0]
    kept = errors[0].astype(float).reshape(4, 2, 640).sum(0)
    # But for the sum's own rounding to bfloat16.
    assert (np.abs(got + kept - x.sum(0)) <= 2.0**-8 * np.abs(got) + 1e-5).all()
    if kind == "placement":
        first, *others = run(kind, arrays, runs=5)
        assert all(x[0].tobytes() == first[0].tobytes() for x in others)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_simd_program_sends_about_a_quarter(bits):
    """As counted in the list of collectives: what a core puts into each exchange of parts."""
    rows = {}
    for name, strategy in (
        ("float32", reduce.FusedAllReduce()),
        ("blocks", reduce.QuantizedAllReduce(bits)),
    ):
        with tf.Graph().as_default(), simd.tpu_program("all:4", "") as made:
            impl = made.mesh_impl
            value = impl.LaidOutTensor([made.per_replica([tf.zeros([256, 64])] * 4)])
            groups = reduce.ProcessorGroups.along(impl, [0])
            state = QuantizationErrors((None,))
            sums, _ = strategy.reduce_gradients(impl, [value], groups, state)
            tf.identity(sums[0].one_slice)
        rows[name] = simd.list_collectives(made).rows
    (whole,) = rows["float32"]
    assert whole.bytes_per_core == 4 * 256 * 64
    assert [(r.operation, r.dtype) for r in rows["blocks"]] == [
        ("AllToAll", "int8"),
        ("AllToAll", "bfloat16"),
    ] * 2
    # An all-reduce sends what it is given twice: to add up, and the sums.
    sent = sum(r.bytes_per_core for r in rows["blocks"])
    assert sent <= (0.27 if bits == 8 else 0.14) * 2 * whole.bytes_per_core


def test_processes_send_each_other_about_a_quarter():
    """One device in each of four processes, counted on the graph's edges."""

    def sent(strategy):
        shape = mtf.convert_to_shape("all:4")
        devices = [f"/job:worker/task:{i}/device:CPU:0" for i in range(4)]
        with tf.Graph().as_default():
            impl = mtf.placement_mesh_impl.PlacementMeshImpl(shape, "", devices)
            parts = mtf.parallel(devices, lambda: tf.placeholder(tf.float32, [256, 64]))
            groups = reduce.ProcessorGroups.along(impl, [0])
            state = QuantizationErrors((None,))
            sums, _ = strategy.reduce_gradients(impl, [impl.LaidOutTensor(parts)], groups, state)
            used = mtf.parallel(devices, tf.identity, sums[0].tensor_list)
            return simd.count_process_transfers(used).bytes

    whole = sent(reduce.FusedAllReduce())
    assert whole == 2 * 3 * 4 * 256 * 64
    assert sent(reduce.QuantizedAllReduce()) <= 0.27 * whole
