"""Training by a wrapper with each strategy, on both kinds of mesh, inside branches too."""

import functools

import gin
import numpy as np
import pytest

from mtf_gradsync import reduce
from tests import harness, models
from tests.wrappers import wrap

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


def losses(kind, wrapper, strategy):
    mesh_shape, layout, batch_dims = MESH

    def wrapped():
        return wrap(
            wrapper,
            models.OPTIMIZERS["sgd"](),
            {"mesh_shape": mesh_shape, "layout": layout, "batch_dims": batch_dims},
            reducer=strategy,
            backward_passes_per_step=3,
            average_aggregated_gradients=False,
            replicas_to_aggregate=4,
            clip_norm=0.1,
        )

    build = models.train(wrapped, batch_dims)
    fetched = harness.run(kind, mesh_shape, layout, build, models.mlp_batches(6)).fetched
    return np.array([step["loss"] for step in fetched])


@functools.lru_cache(maxsize=None)
def usual_losses(kind, wrapper):
    return losses(kind, wrapper, None)


# A SIMD mesh has fewer ways to add up.
@pytest.mark.parametrize(
    ("mesh_kind", "strategy", "wrapper"),
    [
        *(("placement", strategy, "cross_shard") for strategy in STRATEGIES),
        *(("simd", strategy, "cross_shard") for strategy in ("packs", "levels", "bfloat16")),
        ("placement", "float16", "local"),
        ("simd", "levels", "local"),
    ],
    indirect=["mesh_kind"],
)
@pytest.mark.slow
def test_training_is_the_same_with_every_strategy(mesh_kind, strategy, wrapper):
    check_training(mesh_kind, strategy, wrapper)


@pytest.mark.parametrize(("strategy", "wrapper"), [("collective", "replicas"), ("levels", "clip")])
@pytest.mark.mostly_slow
def test_the_other_wrappers_too(monkeypatch, strategy, wrapper):
    monkeypatch.setitem(STRATEGIES, "collective", lambda: reduce.CollectiveAllReduce(3))
    check_training("placement", strategy, wrapper)


def check_training(mesh_kind, strategy, wrapper):
    # Losses are about 1 and fall by about a tenth a step: a gradient off by 2**-7 of its size
    # moves a loss by less than 2**-7 / 10 a step. Without compression only float32 rounds.
    tolerance = 6 * 2.0**-7 / 10 if strategy in ("bfloat16", "float16") else 1e-5
    usual = usual_losses(mesh_kind, wrapper)
    ours = losses(mesh_kind, wrapper, STRATEGIES[strategy]())
    np.testing.assert_allclose(ours, usual, atol=tolerance)
    assert usual[-1] != usual[0]


@pytest.mark.parametrize("wrapper", ["cross_shard", "local"])
@pytest.mark.mostly_slow
def test_overflow_is_said_from_within_an_update(wrapper, capfd):
    strategy = reduce.CompressedAllReduce(wire_dtype="float16", prescale=1e9)
    losses("placement", wrapper, strategy)
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
