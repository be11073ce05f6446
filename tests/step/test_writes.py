"""The graph of a step orders every write of a variable with all other accesses of it."""

import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import tf
from tests import harness, models
from tests.reduce.rounded import RoundedAllReduce
from tests.wrappers import KINDS, wrap

TWO_ON_PLACEMENT, TWO_ON_SIMD = "local(sharded)", "loss_scale(replicas)"
# Every wrapper around clipping, some around each other, and some whose strategies have state.
STACKS = [
    *("clip" if name == "clip" else f"{name}(clip)" for name in KINDS),
    TWO_ON_PLACEMENT,
    TWO_ON_SIMD,
    *(f"state of {name}" for name in ("loss_scale", "local", "synced")),
]


def make_stack(name, opt, variables, axes):
    given = {
        "clip_norm": 1.0,
        "replicas_to_aggregate": 2,
        "variable_averages": 0.9,
        "variables_to_average": variables,
    }
    if name.startswith("state of "):
        given = {"reducer": RoundedAllReduce(), **axes}
        if "synced" in name:
            given["should_skip_update_fn"] = gs.skip_not_finite
    return wrap(name.removeprefix("state of "), opt, axes, **given)


# What is of two of them, on one mesh each: on both is what they are of.
@pytest.mark.parametrize(
    ("kind", "autostack", "stack"),
    [
        *(("placement", False, name) for name in STACKS if name != TWO_ON_SIMD),
        *(("simd", True, name) for name in STACKS if name != TWO_ON_PLACEMENT),
    ],
)
@pytest.mark.mostly_slow
def test_every_access_has_its_place(kind, autostack, stack):
    # Of most slots, where they may be whole or in parts.
    is_small = autostack or stack not in ("cross_shard(clip)", "sharded(clip)")
    make = models.OPTIMIZERS["momentum" if is_small else "adafactor"]
    mesh_shape, layout, _ = harness.MESHES["2" if is_small else "2x2"]
    axes = {"mesh_shape": mesh_shape, "layout": layout}

    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs)
        step = tf.train.get_or_create_global_step()
        opt = make_stack(stack, make(), mesh.graph.trainable_variables, axes)
        return opt.minimize(loss, step), {"loss": loss}

    (feed,) = models.mlp_batches(1)
    assert not harness.built(kind, mesh_shape, layout, build, feed, autostack).races()


def test_a_bare_update_on_a_placement_mesh_races():
    (feed,) = models.mlp_batches(1)
    build = models.train(models.OPTIMIZERS["adam"])
    bare = harness.built("placement", *harness.MESHES["2"][:2], build, feed, may_race=True)
    assert {race.variable for race in bare.races()} >= {f"scale_slice_{i}" for i in range(2)}
