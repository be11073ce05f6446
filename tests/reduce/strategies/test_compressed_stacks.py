"""Compressed sums of gradients under other wrappers."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf
from tests import harness
from tests.optimizers.pipeline.rounded_programs import Program
from tests.reduce import compressed
from tests.reduce.strategies.test_quantized import FEEDS, SIZE, Reference

QUANTIZED = gs.QuantizedAllReduce(block_size=SIZE)
LOW_RANK = gs.LowRankAllReduce(rank=3)
EPS = np.finfo("f").eps


def sgd():
    return mtf.optimize.SgdOptimizer(compressed.RATE)


def accumulate(strategy, mesh):
    return gs.GradientAccumulationOptimizer(sgd(), 2, reducer=strategy, **mesh)


def sharded(strategy, mesh):
    return gs.ShardedUpdateOptimizer(sgd(), min_size=0, reducer=strategy, **mesh)


def loss_scale(strategy, mesh):
    opt = gs.CrossShardOptimizer(sgd())
    return gs.LossScaleOptimizer(opt, loss_scale=4.0, reducer=strategy, **mesh)


STACKS = {"accumulation": accumulate, "sharded updates": sharded, "loss scale": loss_scale}


def program(kind, stack, strategy, **more):
    def make(mesh):
        return STACKS[stack](strategy, mesh)

    return Program(kind, "2x2", make, loss=compressed.loss, feed=FEEDS[0], **more)


def fed(stack):
    """Steps, and the sums of those that are reduced: in pairs, and none that is not finite."""
    feeds = FEEDS[:4]
    if stack == "loss scale":
        bad = {k: np.full_like(x, np.nan) for k, x in FEEDS[4].items()}
        return [feeds[0], bad, *feeds[1:]], feeds
    if stack == "accumulation":
        # A shard's part of a pair stands together.
        shards = [{k: np.split(x, 2) for k, x in feed.items()} for feed in feeds]
        pairs = zip(shards[::2], shards[1::2])
        return feeds, [
            {k: np.concatenate([a[k][0], b[k][0], a[k][1], b[k][1]]) for k in a} for a, b in pairs
        ]
    return feeds, feeds


@pytest.mark.parametrize(
    ("kind", "stack"),
    harness.on_both([(name,) for name in STACKS], [("accumulation",), ("sharded updates",)]),
)
def test_whole_numbers_in_stacks_are_numpy_s(kind, stack):
    feeds, reduced = fed(stack)
    reference = Reference("2x2")
    for feed in reduced:
        reference.step(feed)
    # What is not finite was found by the loss scale, and nothing of it kept.
    reference.check(program(kind, stack, QUANTIZED).run(feeds))


@pytest.mark.parametrize("stack", STACKS)
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
    rows = simd.list_collectives(made.program, lowering=made.lowering).rows
    narrow = [row for row in rows if row.dtype in ("int8", "bfloat16")]
    # One pair of exchanges, of the gradient of w alone.
    assert [row.operation for row in narrow] == ["AllToAll"] * 4
    assert {row.variables for row in narrow[2:]} <= {("w",), ("w", "w/quantization_error")}
    assert len(rows) > len(narrow) + 3
