"""Gradients as low-rank factors: as numpy's on all runtimes, and what is sent."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import reduce, simd, xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.reduce.low_rank import LowRankState
from tests.optimizers.pipeline.rounded_programs import Program
from tests.reduce import compressed, on_mesh

KINDS = ["placement", "shared", "simd"] + ([] if xla.why_no_xla() else ["xla"])
# Rows of replicas, and slices of "hidden".
SHARDS = {"4": (4, 1), "2x2": (2, 2)}
STEPS = 50
FEEDS = compressed.batches(STEPS)
EPS = np.finfo("f").eps


def optimizer(**settings):
    strategy = reduce.LowRankAllReduce(**settings)

    def make(mesh):
        sgd = mtf.optimize.SgdOptimizer(compressed.RATE)
        return gs.CrossShardOptimizer(sgd, reducer=strategy, **mesh)

    return make


def program(kind, mesh, make):
    """The model; fetches all variables as they are before each step."""
    return Program(kind, mesh, lambda axes: Seen(make(axes)), True, compressed.loss, FEEDS[0])


class Seen:
    """An optimizer whose report is every variable of the graph."""

    def __init__(self, opt):
        self.opt = opt

    def compute_gradients(self, value):
        return self.opt.compute_gradients(value)

    def apply_grads(self, grads, variables):
        self.graph = variables[0].graph
        return self.opt.apply_grads(grads, variables)

    def reported(self):
        values = {v.name: mtf.cast(v.value, tf.float32) for v in self.graph.all_variables}
        return {**values, **gs.reported(self.opt)}


@pytest.fixture(scope="module")
def programs():
    made = {}

    def get(kind, mesh):
        if (kind, mesh) not in made:
            made[kind, mesh] = program(kind, mesh, optimizer(rank=3))
        return made[kind, mesh]

    return get


def check_step(before, after, feed, mesh):
    """What one step made of its own state is what numpy makes of it, in float64."""
    shards, slices = SHARDS[mesh]
    grads = compressed.gradients(feed, shards)
    change = (before["w"].astype(float) - after["w"]) / compressed.RATE
    errors = [s["w/low_rank_error"].reshape(shards, 24, 20) for s in (before, after)]
    wanted = grads["w"] + errors[0]
    factors = [s["w/low_rank_factor"] for s in (before, after)]
    for number in range(slices):
        own, moved, left, q, new = (
            compressed.parts_of(x, slices)[number].astype(float)
            for x in (wanted, change, errors[1], *factors)
        )
        total, unsent, right = compressed.low_rank_sum(own, q.T)
        # A product of two matrices rounds as often as it adds up; a basis of the columns of P is
        # as uncertain as P is ill conditioned. Values of w and their difference are rounded, too.
        basis, _ = np.linalg.qr(q.T)
        unsure = 4 * (24 + 20) * EPS * np.linalg.cond(own.sum(0) @ basis)
        size = np.linalg.norm(own, axis=(1, 2)).sum()
        limit = unsure * size + 4 * EPS * np.abs(after["w"]).max() / compressed.RATE
        assert limit < 0.02 * size
        assert np.abs(moved - total).max() <= limit
        assert np.abs(left - unsent).max() <= limit
        # Columns of a basis may have other signs.
        assert np.abs(new.T @ new - right @ right.T).max() <= 2 * limit * size
    for name in ("b", "gain"):
        np.testing.assert_array_equal(
            after[name], before[name] - np.float32(compressed.RATE) * grads[name].sum(0)
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_fifty_steps_are_numpy_s_and_a_restart_has_the_same_bits(kind, programs, tmp_path):
    made = programs(kind, "2x2")
    seen = made.fetches(FEEDS)
    for before, after, feed in list(zip(seen, seen[1:], FEEDS))[1:]:
        check_step(before, after, feed, "2x2")
    halfway = str(tmp_path / "halfway")
    made.run(FEEDS[:25], save=halfway)
    found, whole = made.run(FEEDS[25:], restore=halfway), made.run(FEEDS)
    assert {k: v.tobytes() for k, v in found.items()} == {k: v.tobytes() for k, v in whole.items()}
    # What was applied and what waits is the sum of all gradients: each step rounds its products.
    total = sum(compressed.gradients(feed, 1)["w"][0] for feed in FEEDS)
    size = sum(np.abs(compressed.gradients(feed, 2)["w"]).sum(0).max() for feed in FEEDS)
    waits = found["w/low_rank_error"].astype(float).reshape(2, 24, 20).sum(0)
    applied = -found["w"] / compressed.RATE
    assert np.abs(applied + waits - total).max() <= (24 + 20) * EPS * size


def test_what_is_not_applied_yet_is_the_algorithm_s_own(programs):
    """PowerSGD in float64 by itself, from the state after the first step, for 49 more steps.

    Error feedback amplifies what differs, by more in each step: numpy with numbers that are off by
    one rounding in each step goes as far. Gradients of these sizes have no small rank, so that
    what waits reaches more than the largest number of a gradient, in numpy too.
    """
    seen = programs("simd", "2x2").fetches(FEEDS)
    for number in range(2):

        def part(array, number=number):
            return compressed.parts_of(array, 2)[number].astype(float)

        start = (
            part(seen[1]["w/low_rank_error"].reshape(2, 24, 20)),
            part(seen[1]["w/low_rank_factor"]).T,
        )
        exact = power_sgd(start, part)
        twins = [power_sgd(start, part, np.random.RandomState(seed)) for seed in range(4)]
        off = np.zeros(5)
        for step, waits in enumerate(exact, 2):
            if step == len(seen):
                break
            own = part(seen[step]["w/low_rank_error"].reshape(2, 24, 20))
            others = [own, *(twin[step - 2] for twin in twins)]
            off = np.maximum(off, [np.abs(x - waits).max() for x in others])
            assert off[0] <= 16 * off[1:].max()
        assert off[0] < 0.1
        gradients = [np.abs(part(compressed.gradients(f, 1)["w"][0])).max() for f in FEEDS[1:]]
        assert 1 < max(np.abs(x.sum(0)).max() / g for x, g in zip(exact, gradients)) < 4


def power_sgd(start, part, rng=None):
    """What shards have not sent after each step; rng rounds all numbers up or down."""

    def rounded(x):
        return x if rng is None else x * (1 + EPS * rng.uniform(-1, 1, x.shape))

    errors, right = start
    found = []
    for feed in FEEDS[1:]:
        wanted = rounded(part(compressed.gradients(feed, 2)["w"]) + errors)
        left, _ = np.linalg.qr(sum(one @ rounded(right) for one in wanted))
        own = np.stack([one.T @ left for one in wanted])
        errors, right = wanted - np.einsum("ir,scr->sic", left, own), own.sum(0)
        found.append(errors)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_full_rank_is_the_plain_sum(kind):
    full = optimizer(rank=20, min_compression_rate=0.1)
    found = program(kind, "2x2", full).run(FEEDS[:10])
    total = sum(compressed.gradients(feed, 1)["w"][0] for feed in FEEDS[:10])
    size = sum(np.linalg.norm(compressed.gradients(feed, 1)["w"][0]) for feed in FEEDS[:10])
    assert np.abs(-found["w"] / compressed.RATE - total).max() <= (24 + 20) * EPS * size
    # A core's own gradient has columns that the sum has not; over the cores these add up to 0.
    waits = found["w/low_rank_error"].astype(float).reshape(2, 24, 20).sum(0)
    assert np.abs(waits).max() <= (24 + 20) * EPS * size


@pytest.mark.slow
def test_it_moves_to_another_mesh_with_the_sum_of_what_was_not_sent(programs, tmp_path):
    path = None
    for number, (mesh, kind) in enumerate([("4", "simd"), ("2x2", "placement"), ("4", KINDS[-1])]):
        feeds, before = FEEDS[5 * number :][:5], path
        path = str(tmp_path / f"{number}")
        found = programs(kind, mesh).run(feeds, restore=before, save=path)
    total = sum(compressed.gradients(feed, 1)["w"][0] for feed in FEEDS[:15])
    size = sum(np.abs(compressed.gradients(feed, 4)["w"]).sum(0).max() for feed in FEEDS[:15])
    waits = found["w/low_rank_error"].astype(float).sum(0)
    assert np.abs(waits).max() > 1
    off = np.abs(-found["w"] / compressed.RATE + waits - total).max()
    assert off <= (24 + 20) * EPS * size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_the_first_steps_reduce_gradients_as_they_are(kind):
    made = program(kind, "2x2", optimizer(rank=3, start_step=2, warm_start=False))
    seen = made.fetches(FEEDS[:5])
    assert [s["CrossShardOptimizer/low_rank_step"] for s in seen] == [0, 1, 2, 3, 4]
    grads = [compressed.gradients(feed, 1)["w"][0] for feed in FEEDS]
    np.testing.assert_array_equal(seen[2]["w"], -compressed.RATE * (grads[0] + grads[1]))
    assert not seen[2]["w/low_rank_error"].any()
    for number in (2, 3):
        change = (seen[number]["w"] - seen[number + 1]["w"]).astype(float)
        for one in compressed.parts_of(change, 2):
            sizes = np.linalg.svd(one, compute_uv=False)
            assert sizes[2] > 0.1 > 1e-3 * sizes[0] > sizes[3]
        assert seen[number + 1]["w/low_rank_error"].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow(keep="shared")
def test_what_is_not_finite_is_found_and_nothing_of_it_kept(kind, programs):
    feeds = [FEEDS[0], {k: x.copy() for k, x in FEEDS[1].items()}]
    feeds[1]["x"][0, 3] = np.inf
    found = programs(kind, "2x2").run(feeds)
    assert np.isnan(found["w"]).all()
    assert np.isfinite(found["w/low_rank_error"]).all()
    assert np.isfinite(found["w/low_rank_factor"]).all()


def test_the_rate_is_reported(programs):
    fetched = programs("simd", "2x2").fetches(FEEDS[:1])[0]
    # A slice of w has 24 rows and 10 columns.
    assert fetched["compression/rate"] == np.float32((240 + 11) / (3 * (24 + 10) + 11))
    assert fetched["compression/whole"] == 2


def reduced(kind, arrays, **settings):
    """Sums over "rows" of 4, and what is not sent."""
    strategy = reduce.LowRankAllReduce(warm_start=False, **settings)
    errors = [np.zeros(x.shape, "f") for x in arrays]
    step = np.zeros([8], np.int32)

    def make(impl, values):
        groups = reduce.ProcessorGroups.along(impl, [0])
        count, given, old = values[0], values[1 : len(arrays) + 1], values[len(arrays) + 1 :]
        state = LowRankState(count, tuple(old), (None,) * len(arrays))
        sums, state = strategy.reduce_gradients(impl, given, groups, state)
        return [*sums, *state.errors]

    out = on_mesh.run(kind, "rows:4;cols:2", [step, *arrays, *errors], make)
    return out[: len(arrays)], out[len(arrays) :]


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.mostly_slow
def test_matrices_of_any_numbers(kind):
    """Zeros, huge and tiny numbers, rank below the factors', three dimensions, one element."""
    rng = np.random.RandomState(1)
    thin = rng.randn(8, 24, 1) @ rng.randn(8, 1, 20)
    arrays = [
        np.zeros([8, 24, 20], "f"),
        (rng.randn(8, 24, 20) * 1e30).astype("f"),
        (rng.randn(8, 24, 20) * 1e-42).astype("f"),
        np.repeat(thin[:1], 8, 0).astype("f"),
        rng.randn(8, 6, 4, 20).astype("f"),
        rng.randn(8, 1, 1).astype("f"),
        rng.randn(8, 0, 3).astype("f"),
    ]
    sums, errors = reduced(kind, arrays, rank=3)
    for x, total, error in zip(arrays, sums, errors):
        parts, got, kept = (v.astype(float).reshape(4, 2, *v.shape[1:]) for v in (x, total, error))
        size = np.abs(parts).max(initial=0)
        off = np.abs(got[0] + kept.sum(0) - parts.sum(0)).max(initial=0)
        assert off <= 4 * (24 + 20) * EPS * size + 2.0**-120
        assert all((one == got[0]).all() for one in got)
    assert np.linalg.matrix_rank(sums[1][0], tol=1e26) == 3
    # Rank 1 in every core: nothing of it is lost, and zeros stay zeros.
    total = 4 * arrays[3][0].astype(float)
    bound = 4 * (24 + 20) * EPS * np.abs(total).max()
    np.testing.assert_allclose(sums[3][0], total, rtol=0, atol=bound)
    assert not sums[0].any()
    np.testing.assert_array_equal(sums[5][:2], arrays[5].reshape(4, 2, 1, 1).sum(0))


def test_a_simd_program_sends_what_the_formula_says():
    with tf.Graph().as_default(), simd.tpu_program("all:4", "") as made:
        impl = made.mesh_impl
        shapes = [[64, 48], [64, 48], [48], []]
        values = [impl.LaidOutTensor([made.per_replica([tf.zeros(shape)] * 4)]) for shape in shapes]
        groups = reduce.ProcessorGroups.along(impl, [0])
        factor = impl.LaidOutTensor([tf.zeros([4, 48])])
        state = LowRankState(None, (None,) * 4, (factor, factor, None, None))
        sums, _ = reduce.LowRankAllReduce(rank=4).reduce_gradients(impl, values, groups, state)
        for x in sums:
            tf.identity(x.one_slice)
    rows = simd.list_collectives(made).rows
    assert {r.operation for r in rows} == {"CrossReplicaSum"}
    assert len({r.together for r in rows}) == 2
    assert sum(r.bytes_per_core for r in rows) == 4 * (2 * 4 * (64 + 48) + 48 + 1)
