"""The graph of a step orders every write of a variable with all other accesses of it."""

import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import tf
from tests import harness, models
from tests.reduce.rounded import RoundedAllReduce

TWO_ON_PLACEMENT, TWO_ON_SIMD = "sharded, accumulated", "loss_scale, sync_replicas"


def clipped(optimizer):
    return gs.ClipByGlobalNormOptimizer(optimizer, 1.0)


# name -> what makes it for the variables that are trained, on a mesh.
WRAPPERS = {
    "cross_shard": lambda opt, _, axes: gs.CrossShardOptimizer(opt),
    "clip": lambda opt, _, axes: clipped(opt),
    "local": lambda opt, _, axes: gs.GradientAccumulationOptimizer(
        clipped(opt), 2, accumulate="local", **axes
    ),
    "synced": lambda opt, _, axes: gs.GradientAccumulationOptimizer(
        clipped(opt), 2, accumulate="synced"
    ),
    "sync_replicas": lambda opt, variables, axes: gs.SyncReplicasOptimizer(
        clipped(opt), 2, variable_averages=0.9, variables_to_average=variables, **axes
    ),
    "sharded": lambda opt, _, axes: gs.ShardedUpdateOptimizer(clipped(opt), min_size=1, **axes),
    TWO_ON_PLACEMENT: lambda opt, _, axes: gs.GradientAccumulationOptimizer(
        gs.ShardedUpdateOptimizer(opt, min_size=1, **axes), 2
    ),
    "loss_scale": lambda opt, _, axes: gs.LossScaleOptimizer(clipped(opt)),
    TWO_ON_SIMD: lambda opt, _, axes: gs.LossScaleOptimizer(
        gs.SyncReplicasOptimizer(opt, 2, **axes)
    ),
    "state": lambda opt, _, axes: gs.LossScaleOptimizer(opt, reducer=RoundedAllReduce(), **axes),
    "state, accumulated": lambda opt, _, axes: gs.GradientAccumulationOptimizer(
        opt, 2, reducer=RoundedAllReduce(), **axes
    ),
    "state, synced": lambda opt, _, axes: gs.GradientAccumulationOptimizer(
        opt,
        2,
        accumulate="synced",
        should_skip_update_fn=gs.skip_not_finite,
        reducer=RoundedAllReduce(),
        **axes,
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
@pytest.mark.mostly_slow
def test_every_access_has_its_place(kind, autostack, wrapper):
    # Of most slots, where they may be whole or in parts.
    is_small = autostack or wrapper not in ("cross_shard", "sharded")
    make = models.OPTIMIZERS["momentum" if is_small else "adafactor"]
    mesh_shape, layout, _ = harness.MESHES["2" if is_small else "2x2"]
    axes = {"mesh_shape": mesh_shape, "layout": layout}

    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs)
        step = tf.train.get_or_create_global_step()
        opt = WRAPPERS[wrapper](make(), mesh.graph.trainable_variables, axes)
        return opt.minimize(loss, step), {"loss": loss}

    (feed,) = models.mlp_batches(1)
    assert not harness.built(kind, mesh_shape, layout, build, feed, autostack).races()


def test_a_bare_update_on_a_placement_mesh_races():
    (feed,) = models.mlp_batches(1)
    build = models.train(models.OPTIMIZERS["adam"])
    bare = harness.built("placement", *harness.MESHES["2"][:2], build, feed, may_race=True)
    assert {race.variable for race in bare.races()} >= {f"scale_slice_{i}" for i in range(2)}
