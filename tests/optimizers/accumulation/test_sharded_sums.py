"""accumulate="sharded": each replica adds up its part of the reduced gradients (ZeRO-2)."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd
from tests.optimizers.sharded_updates import small_model
from tests.optimizers.sharded_updates.small_model import OPTIMIZERS, assert_close, batches, run

K = 2
STEPS = 2 * K
EPS = np.finfo(np.float32).eps
# Values are around 1. A sum over four shards is added up in another order: some float32 ulp of each
# gradient, in each step.
TOLERANCE = STEPS * 16 * EPS
ACCUMULATOR = "/gradient_accumulator"
NAME = "GradientAccumulationOptimizer"


def axes_of(mesh):
    return gs.ReplicaAxes(*small_model.MESHES[mesh])


def accumulated(opt, mesh, accumulate="sharded", passes=K, average=True, **kwargs):
    return gs.GradientAccumulationOptimizer(
        opt, passes, average, accumulate=accumulate, axes=axes_of(mesh), **kwargs
    )


def stack(mesh, accumulate, optimizer="adam", is_sharded=True, **kwargs):
    opt = OPTIMIZERS[optimizer]()
    opt = small_model.sharded(opt, mesh) if is_sharded else opt
    return accumulated(opt, mesh, accumulate, **kwargs)


@pytest.mark.parametrize(
    ("kind", "mesh", "optimizer", "is_sharded"),
    [
        ("simd", "4", "adafactor", True),
        ("simd", "2x2x2", "adam", True),
        ("simd", "2x2x2", "momentum", False),
        ("simd", "experts", "adam", False),
        ("own memories", "4", "adam", True),
        ("own memories", "2x2", "adafactor", False),
        ("placement", "2x2", "sgd", True),
        pytest.param("xla", "4x2", "adam", True, marks=pytest.mark.xla),
    ],
)
@pytest.mark.mostly_slow
def test_trains_as_synced_sums_do(kind, mesh, optimizer, is_sharded):
    """Tied variables, a second axis, sizes that nothing divides, and experts are in the model."""
    feeds = batches(STEPS)
    found, expected = (
        run(kind, mesh, lambda where=where: stack(mesh, where, optimizer, is_sharded), feeds)
        for where in ("sharded", "synced")
    )
    assert_close(found.variables, expected.variables, TOLERANCE)


def slices_of_sums(made):
    return {
        v.name[: -len(ACCUMULATOR)]: x.laid_out_tensor.slice_shape
        for v, x in made.lowering.variables.items()
        if v.name.endswith(ACCUMULATOR)
    }


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_core_holds_its_part_of_each_sum(is_sharded):
    made = small_model.built(
        "simd", "4x2", lambda: stack("4x2", "sharded", is_sharded=is_sharded), batches(1)[0],
        autostack=False,
    )  # fmt: skip
    # Four replicas; the layout splits "hidden" (64) in two. By default parts have to save tiles.
    whole = {"b1": [32], "scale": [], "odd": [7]}
    parts = {"w1": [2, 32], "w2": [32, 16], "b2": [16], "gain": [16]}
    if not is_sharded:
        del parts["b2"], parts["gain"]
        whole.update(b2=[64], gain=[64])
    assert slices_of_sums(made) == {**whole, **parts}


def sent(where, is_sharded, mesh="4"):
    """Bytes that a core sends for gradients: in each step, and in one with an update."""
    made = small_model.built(
        "simd", mesh, lambda: stack(mesh, where, is_sharded=is_sharded), batches(1)[0],
        names=("w1", "w2", "odd"),
    )  # fmt: skip
    report = simd.list_collectives(made.program, lowering=made.lowering)
    shards = axes_of(mesh).num_shards
    # Around a ring an all-reduce sends 2 (s - 1) / s of its operand, and a reduce-scatter half of
    # that; so does an all-gather, which is an all-to-all of copies of the part.
    share = (shards - 1) / shards
    of = {"CrossReplicaSum": 2 * share, "XlaReduceScatter": share, "AllToAll": share}
    found = {True: 0.0, False: 0.0}
    for row in report.rows:
        if row.shape:  # the loss is a scalar
            found[row.is_conditional] += of[row.operation] * row.bytes_per_core
    return found[False], found[True]


def test_half_as_many_bytes_are_sent_as_by_synced_sums():
    # Of "odd", which nothing divides, one number is sent: its gradient is that of a mean.
    w1, w2 = (4 * size * 64 * 3 / 4 for size in (8, 64))
    assert sent("synced", False) == (2 * (w1 + w2), 0)
    # The sums are gathered for an update. A part of w1 would save too few of a TPU's tiles.
    assert sent("sharded", False) == (2 * w1 + w2, w2)
    # With parts of all variables, nothing is gathered but new values.
    assert sent("synced", True) == (2 * (w1 + w2), w1 + w2)
    assert sent("sharded", True) == (w1 + w2, w1 + w2)
