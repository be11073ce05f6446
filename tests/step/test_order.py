"""The graph of a step orders every write of a variable with all other accesses of it."""

import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import tf
from tests import harness, models
from tests.reduce.rounded import RoundedAllReduce

MESH, LAYOUT = "rows:2;cols:2", "batch:rows;hidden:cols"
AXES = {"mesh_shape": MESH, "layout": LAYOUT}
TWO_ON_PLACEMENT, TWO_ON_SIMD = "sharded, accumulated", "loss_scale, sync_replicas"


def clipped(optimizer):
    return gs.ClipByGlobalNormOptimizer(optimizer, 1.0)


# name -> what makes it for the variables that are trained.
WRAPPERS = {
    "cross_shard": lambda opt, _: gs.CrossShardOptimizer(opt),
    "clip": lambda opt, _: clipped(opt),
    "local": lambda opt, _: gs.GradientAccumulationOptimizer(
        clipped(opt), 2, accumulate="local", **AXES
    ),
    "synced": lambda opt, _: gs.GradientAccumulationOptimizer(clipped(opt), 2, accumulate="synced"),
    "sync_replicas": lambda opt, variables: gs.SyncReplicasOptimizer(
        clipped(opt), 2, variable_averages=0.9, variables_to_average=variables, **AXES
    ),
    "sharded": lambda opt, _: gs.ShardedUpdateOptimizer(clipped(opt), min_size=1, **AXES),
    TWO_ON_PLACEMENT: lambda opt, _: gs.GradientAccumulationOptimizer(
        gs.ShardedUpdateOptimizer(opt, min_size=1, **AXES), 2
    ),
    "loss_scale": lambda opt, _: gs.LossScaleOptimizer(clipped(opt)),
    TWO_ON_SIMD: lambda opt, _: gs.LossScaleOptimizer(gs.SyncReplicasOptimizer(opt, 2, **AXES)),
    "state": lambda opt, _: gs.LossScaleOptimizer(opt, reducer=RoundedAllReduce(), **AXES),
    "state, accumulated": lambda opt, _: gs.GradientAccumulationOptimizer(
        opt, 2, reducer=RoundedAllReduce(), **AXES
    ),
    "state, synced": lambda opt, _: gs.GradientAccumulationOptimizer(
        opt,
        2,
        accumulate="synced",
        should_skip_update_fn=gs.skip_not_finite,
        reducer=RoundedAllReduce(),
        **AXES,
    ),
}


# What is of two of them, on one mesh each: on both is what they are of.
@pytest.mark.parametrize(
    ("kind", "autostack", "wrapper"),
    [
        *(("placement", False, name) for name in sorted(WRAPPERS) if name != TWO_ON_SIMD),
        *(("simd", True, name) for name in sorted(WRAPPERS) if name != TWO_ON_PLACEMENT),
    ],
)
def test_every_access_has_its_place(kind, autostack, wrapper):
    # Of most slots, where they may be whole or in parts.
    is_small = wrapper not in ("cross_shard", "sharded")
    make = models.OPTIMIZERS["momentum" if autostack or is_small else "adafactor"]

    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs)
        step = tf.train.get_or_create_global_step()
        opt = WRAPPERS[wrapper](make(), mesh.graph.trainable_variables)
        return opt.minimize(loss, step), {"loss": loss}

    assert not built(kind, build, autostack).races()


def test_a_bare_update_on_a_placement_mesh_races():
    bare = built("placement", models.train(models.OPTIMIZERS["adam"]))
    assert {race.variable for race in bare.races()} >= {f"scale_slice_{i}" for i in range(4)}


def built(kind, build, autostack=True):
    (feed,) = models.mlp_batches(1)
    return harness.built(kind, MESH, LAYOUT, build, feed, autostack)
