"""Compressed sums of gradients under other wrappers."""

import functools
import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models
from tests.optimizers.pipeline.rounded_programs import MESHES, Program
from tests.reduce import compressed
from tests.reduce.quantized_reference import FEEDS, SIZE, Reference
from tests.wrappers import wrap

QUANTIZED = gs.QuantizedAllReduce(block_size=SIZE)
LOW_RANK = gs.LowRankAllReduce(rank=3)
EPS = np.finfo("f").eps


def sgd():
    return mtf.optimize.SgdOptimizer(compressed.RATE)


STACKS = ["local", "sharded", "loss_scale"]


def program(kind, stack, strategy, **more):
    def make(mesh):
        inner = gs.CrossShardOptimizer(sgd()) if stack == "loss_scale" else sgd()
        how = {"reducer": strategy, "loss_scale": 4.0, "average_aggregated_gradients": False}
        return wrap(stack, inner, min_size=0, **how, **mesh)

    return Program(kind, "2x2", make, loss=compressed.loss, feed=FEEDS[0], **more)


def fed(stack):
    """Steps, and the sums of those that are reduced: in pairs, and none that is not finite."""
    feeds = FEEDS[:4]
    if stack == "loss_scale":
        bad = {k: np.full_like(x, np.nan) for k, x in FEEDS[4].items()}
        return [feeds[0], bad, *feeds[1:]], feeds
    if stack == "local":
        # A shard's part of a pair stands together.
        shards = [{k: np.split(x, 2) for k, x in feed.items()} for feed in feeds]
        pairs = zip(shards[::2], shards[1::2])
        return feeds, [
            {k: np.concatenate([a[k][0], b[k][0], a[k][1], b[k][1]]) for k in a} for a, b in pairs
        ]
    return feeds, feeds


@pytest.mark.parametrize(
    ("kind", "stack"),
    [
        *harness.on_both([(name,) for name in STACKS], [("local",), ("sharded",)]),
        *(("shared", name) for name in STACKS),
    ],
)
@pytest.mark.mostly_slow
def test_whole_numbers_in_stacks_are_numpy_s(kind, stack):
    feeds, reduced = fed(stack)
    reference = Reference("2x2")
    for feed in reduced:
        reference.step(feed)
    # What is not finite was found by the loss scale, and nothing of it kept.
    reference.check(program(kind, stack, QUANTIZED).run(feeds))


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.mostly_slow
def test_low_rank_in_stacks_keeps_what_it_does_not_apply(stack):
    feeds, _ = fed(stack)
    found = program("simd", stack, LOW_RANK).run(feeds)
    total = sum(compressed.gradients(feed, 1)["w"][0] for feed in FEEDS[:4])
    waits = found["w/low_rank_error"].astype(float).reshape(2, 24, 20).sum(0)
    assert np.abs(waits).max() > 1
    limit = 4 * (24 + 20) * EPS * np.abs(total).max()
    assert np.abs(-found["w"] / compressed.RATE + waits - total).max() <= limit


def test_norms_and_flags_do_not_go_that_way():
    def make(mesh):
        clip = gs.ClipByGlobalNormOptimizer(sgd(), 1e9, reducer=QUANTIZED, **mesh)
        return gs.LossScaleOptimizer(clip, loss_scale=4.0, reducer=QUANTIZED, **mesh)

    made = Program("simd", "2x2", make, True, compressed.loss, FEEDS[0]).built
    rows = made.collectives().rows
    narrow = [row for row in rows if row.dtype in ("int8", "bfloat16")]
    # One pair of exchanges, of the gradient of w alone.
    assert [row.operation for row in narrow] == ["AllToAll"] * 4
    assert {row.variables for row in narrow[2:]} <= {("w",), ("w", "w/quantization_error")}
    assert len(rows) > len(narrow) + 3


CLIP = 18.0
MASKS = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("kind", "shape", "layout", "sessions"),
    [
        ("placement", *MESHES["4"], 1),
        ("simd", *MESHES["4"], 1),
        ("shared", "a:2;b:4", "batch:b", 4),  # of what is kept, too, each slice has one writer
    ],
)
@pytest.mark.mostly_slow
def test_shards_that_do_not_contribute_send_what_they_kept(kind, shape, layout, sessions):
    """An update sends all that was kept, also that of shards whose gradients are not in it.

    A shard does not contribute because of a mask, or of a NaN.
    """

    def build(mesh, inputs):
        opt = gs.SyncReplicasOptimizer(
            sgd(), 2, contributes=inputs["mask"], reducer=QUANTIZED, mesh_shape=shape,
            layout=layout,
        )  # fmt: skip
        step = mtf.get_variable(mesh, "steps", mtf.Shape([]), tf.int32, trainable=False)
        return opt.minimize(compressed.loss(mesh, inputs), global_step=step), {}

    feeds = [{**feed, "mask": np.array(mask, "i")} for feed, mask in zip(FEEDS, MASKS)]
    bad = {k: x.copy() for k, x in FEEDS[1].items()}
    bad["x"][-1, 0] = bad["y"][-1, 0] = np.nan  # of the last shard
    feeds[1] = {**bad, "mask": np.array([1, 1, 0, 1], "i")}
    reference, waiting, count, updates = Reference("4"), {}, 0, 0
    for feed, mask in zip(FEEDS, MASKS):
        for name, grad in compressed.gradients(feed, 4).items():
            given = np.einsum("s,s...->s...", mask, grad)
            waiting[name] = waiting.get(name, 0) + given
        count += sum(mask)
        if count >= 2:
            before = reference.errors["w"]
            reference.apply(waiting, divisor=count / 4)
            assert all((before[i] != reference.errors["w"][i]).any() for i in range(4))
            waiting, count, updates = {}, 0, updates + 1
    made = harness.built(kind, shape, layout, build, feeds[0])
    assert not made.races()
    for _ in range(sessions):
        found = made.run(feeds).variables
        reference.check(found)
        assert updates == found["steps"] == 4


@pytest.mark.mostly_slow
def test_gradients_that_were_clipped_by_shard(mesh_kind):
    """Per-shard gradients are sent in blocks; what is applied and what waits is all of them."""
    shape, layout = MESHES["4"]

    def build(mesh, inputs):
        opt = gs.CrossShardOptimizer(sgd(), reducer=QUANTIZED, mesh_shape=shape, layout=layout)
        grads, variables = zip(*opt.compute_gradients(compressed.loss(mesh, inputs)))
        axes = gs.ReplicaAxes(shape, layout)
        clipped, norms = gs.clip_by_shard_norm(grads, CLIP, axes)
        return opt.apply_grads(clipped, variables), {"norms": norms, **gs.reported(opt)}

    norms = []
    result = harness.run(mesh_kind, shape, layout, build, FEEDS[:3])
    total = dict.fromkeys("wb", 0.0)
    for feed, fetched in zip(FEEDS, result.fetched):
        grads = compressed.gradients(feed, 4)
        norms.append(np.sqrt(sum(np.square(g).reshape(4, -1).sum(1) for g in grads.values())))
        np.testing.assert_allclose(fetched["norms"], norms[-1], rtol=64 * EPS)
        assert fetched["compression/rate"] > 3
        for name in total:
            total[name] += np.einsum("s...,s->...", grads[name], np.minimum(1, CLIP / norms[-1]))
    assert np.min(norms) < CLIP < np.max(norms)
    for name, expected in total.items():
        applied = -result.variables[name].astype(float) / compressed.RATE
        waits = (
            result.variables[f"{name}/quantization_error"].astype(float).reshape(4, *applied.shape)
        )
        assert np.abs(waits).max() > 0.01
        limit = 3 * 64 * EPS * np.abs(expected).max()
        assert np.abs(applied + waits.sum(0) - expected).max() <= limit


@pytest.mark.slow
def test_a_run_goes_on_with_another_strategy(tmp_path):
    """Each begins with nothing unsent of its own, and finds the values of the run before."""
    programs = {
        name: Program("simd", "2x2", functools.partial(cross_shard, reducer), loss=compressed.loss,
                      feed=FEEDS[0])
        for name, reducer in (("plain", None), ("quantized", QUANTIZED), ("low rank", LOW_RANK))
    }  # fmt: skip
    path, number, values = None, 0, {}
    for name in ("plain", "quantized", "low rank", "quantized", "plain"):
        before, path = path, str(tmp_path / f"{number}")
        found = programs[name].run(FEEDS[number : number + 2], restore=before, save=path)
        total = sum(compressed.gradients(feed, 1)["w"][0] for feed in FEEDS[number : number + 2])
        waits = sum(
            found[f"w/{kept}"].astype(float).reshape(2, 24, 20).sum(0)
            for kept in ("quantization_error", "low_rank_error")
            if f"w/{kept}" in found
        )
        applied = (values.get("w", 0.0) - found["w"].astype(float)) / compressed.RATE
        limit = 4 * (24 + 20) * EPS * np.abs(FEEDS_TOTAL).max()
        assert np.abs(applied + waits - total).max() <= limit
        assert (np.abs(waits).max() > 0) == (name != "plain")
        values, number = found, number + 2


FEEDS_TOTAL = sum(np.abs(compressed.gradients(feed, 1)["w"][0]) for feed in FEEDS[:10])


def cross_shard(reducer, mesh):
    return gs.CrossShardOptimizer(sgd(), reducer=reducer, **mesh)


def test_sums_without_an_optimizer_are_not_compressed_and_say_so(caplog):
    """A strategy's state belongs to the variables of an optimizer."""
    shape, layout = MESHES["2x2"]

    def build(mesh, inputs):
        loss = compressed.loss(mesh, inputs)
        grads, variables = models.gradients(loss)
        sums = gs.sum_shards(grads, gs.ReplicaAxes(shape, layout), reducer=QUANTIZED)
        return [], {v.name: x for v, x in zip(variables, sums)}

    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        (fetched,) = harness.run("simd", shape, layout, build, FEEDS[:1]).fetched
    for name, grad in compressed.gradients(FEEDS[0], 1).items():
        np.testing.assert_array_equal(fetched[name], grad[0])
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("sum_shards does not compress gradients by QuantizedAllReduce")
