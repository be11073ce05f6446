"""Training by a wrapper with each strategy, on both kinds of mesh, inside branches too."""

import functools

import gin
import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import reduce
from tests import harness, models

STRATEGIES = {
    "one_device": lambda: reduce.ReductionToOneDevice(),
    "ring": lambda: reduce.RingAllReduce(),
    "packs": lambda: reduce.AllReduce(num_packs=2),
    "levels": lambda: reduce.HierarchicalAllReduce(("add_n/add_n", 2)),
    "bfloat16": lambda: reduce.CompressedAllReduce(),
    "float16": lambda: reduce.CompressedAllReduce(reduce.AllReduce(), "float16", 64.0),
}


# Four processors, which sums reach in one step or in two.
MESH = ("a:2;b:2", "outer:a;batch:b", ("outer", "batch"))


def losses(kind, wrap):
    mesh_shape, layout, batch_dims = MESH
    build = models.train(lambda: wrap(models.OPTIMIZERS["sgd"]()), batch_dims)
    fetched = harness.run(kind, mesh_shape, layout, build, models.mlp_batches(6)).fetched
    return np.array([step["loss"] for step in fetched])


def accumulating(inner, strategy):
    mesh_shape, layout, batch_dims = MESH
    return gs.GradientAccumulationOptimizer(
        inner, 3, mesh_shape=mesh_shape, layout=layout, batch_dims=batch_dims, reducer=strategy
    )


def sync_replicas(inner, strategy):
    mesh_shape, layout, batch_dims = MESH
    return gs.SyncReplicasOptimizer(
        inner, 4, mesh_shape=mesh_shape, layout=layout, batch_dims=batch_dims, reducer=strategy
    )


WRAPPERS = {
    "cross_shard": lambda inner, strategy: gs.CrossShardOptimizer(inner, reducer=strategy),
    "accumulation": accumulating,
    "sync_replicas": sync_replicas,
    "clip": lambda inner, strategy: gs.ClipByGlobalNormOptimizer(inner, 0.1, reducer=strategy),
}


@functools.lru_cache(maxsize=None)
def usual_losses(kind, wrapper):
    return losses(kind, lambda inner: WRAPPERS[wrapper](inner, None))


# A SIMD mesh has fewer ways to add up.
@pytest.mark.parametrize(
    ("mesh_kind", "strategy", "wrapper"),
    [
        *(("placement", strategy, "cross_shard") for strategy in STRATEGIES),
        *(("simd", strategy, "cross_shard") for strategy in ("packs", "levels", "bfloat16")),
        ("placement", "float16", "accumulation"),
        ("simd", "levels", "accumulation"),
    ],
    indirect=["mesh_kind"],
)
@pytest.mark.slow
def test_training_is_the_same_with_every_strategy(mesh_kind, strategy, wrapper):
    check_training(mesh_kind, strategy, wrapper)


@pytest.mark.parametrize(
    ("strategy", "wrapper"), [("collective", "sync_replicas"), ("levels", "clip")]
)
@pytest.mark.mostly_slow
def test_the_other_wrappers_too(monkeypatch, strategy, wrapper):
    monkeypatch.setitem(STRATEGIES, "collective", lambda: reduce.CollectiveAllReduce(3))
    check_training("placement", strategy, wrapper)


def check_training(mesh_kind, strategy, wrapper):
    def wrap(inner):
        return WRAPPERS[wrapper](inner, STRATEGIES[strategy]())

    # Losses are about 1 and fall by about a tenth a step: a gradient off by 2**-7 of its size
    # moves a loss by less than 2**-7 / 10 a step. Without compression only float32 rounds.
    tolerance = 6 * 2.0**-7 / 10 if strategy in ("bfloat16", "float16") else 1e-5
    usual, ours = usual_losses(mesh_kind, wrapper), losses(mesh_kind, wrap)
    np.testing.assert_allclose(ours, usual, atol=tolerance)
    assert usual[-1] != usual[0]


@pytest.mark.parametrize("wrapper", ["cross_shard", "accumulation"])
@pytest.mark.mostly_slow
def test_overflow_is_said_from_within_an_update(wrapper, capfd):
    def wrap(inner):
        strategy = reduce.CompressedAllReduce(wire_dtype="float16", prescale=1e9)
        return WRAPPERS[wrapper](inner, strategy)

    losses("placement", wrap)
    # Six steps, of which accumulation communicates on two; once infinite, nothing overflows.
    assert capfd.readouterr().err.count("float16 overflow") == 1


def test_gin_makes_a_strategy():
    gin.clear_config()
    gin.parse_config(
        """
        CompressedAllReduce.reducer = @HierarchicalAllReduce()
        CompressedAllReduce.wire_dtype = "float16"
        CompressedAllReduce.prescale = 128.0
        HierarchicalAllReduce.spec = [("add_n", 1, 4096), ("add_n/add_n", 2, -1)]
        HierarchicalAllReduce.outer_axes = "rows"
        CrossShardOptimizer.reducer = @CompressedAllReduce()
        """
    )
    try:
        strategy = reduce.CompressedAllReduce()
    finally:
        gin.clear_config()
    assert strategy.prescale == 128
    assert [entry.limit for entry in strategy.reducer.spec] == [4096, -1]
    assert strategy.reducer.outer_axes == ("rows",)
