"""SyncReplicasOptimizer against a numpy model of its rules."""

import functools

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference
from tests.properties import sync_replicas_schedules as schedules

_, LAYOUT, BATCH_DIMS = harness.MESHES["4x2"]
STATE = ("local_step", "made", "dropped", "count", "update_step")


def step(to_aggregate, optimizer, mesh_shape, **kwargs):
    """A `harness.Build` that replays a schedule's feeds."""

    def build(mesh, inputs):
        axes = gs.ReplicaAxes(mesh_shape, LAYOUT, BATCH_DIMS)
        loss = models.mlp_loss(mesh, inputs, BATCH_DIMS)
        variables = mesh.graph.trainable_variables
        grads = mtf.gradients([loss], [v.value for v in variables])
        shards = [
            g + poison(inputs, v, g.shape, axes)
            for g, v in zip(gs.per_shard(grads, axes), variables)
        ]
        opt = gs.SyncReplicasOptimizer(
            models.OPTIMIZERS[optimizer](),
            to_aggregate,
            axes=axes,
            contributes=inputs["contributes"],
            local_steps=inputs["local_steps"],
            variable_averages=0.9,
            variables_to_average=variables,
            **kwargs,
        )
        operations = opt.apply_grads(shards, variables)
        return operations, {"loss": loss}

    def poison(inputs, variable, shape, axes):
        value = inputs[f"poison_{variable.name}"]
        imported = mtf.import_tf_tensor(variable.mesh, value, mtf.Shape(list(axes.shard_dims)))
        return mtf.broadcast(imported, shape)

    return build


def check(result, states):
    """Compares what a run left with the model's last state."""
    last = states[-1]
    found = {name: result.variables[f"sync_replicas/{name}"] for name in STATE}
    for name in ("local_step", "made", "dropped"):
        np.testing.assert_array_equal(found[name].reshape(-1), getattr(last, name), err_msg=name)
    assert found["count"] == last.count
    assert found["update_step"] == last.global_step
    for name, value in last.values.items():
        # A few float32 roundings for each update, of numbers of about 1.
        np.testing.assert_allclose(result.variables[name], value, atol=2e-5, err_msg=name)
        average = result.variables[f"{name}/ExponentialMovingAverage"]
        np.testing.assert_allclose(average, last.averages[name], atol=2e-5, err_msg=name)


SCHEDULES = {
    "all contribute": schedules.Schedule((4,), 4, 3),
    "backup replicas": schedules.Schedule((4,), 3, 4, sits_out=((0, 1), (2, 3))),
    "one is carried over, then one is missing": schedules.Schedule(
        (4,), 2, 4, sits_out=((0, 1), (0, 2), (0, 3), (1, 2), (2, 0), (2, 1), (2, 2))
    ),
    "several steps an update": schedules.Schedule((4,), 6, 5, sits_out=((1, 0),)),
    "not finite": schedules.Schedule(
        (4,), 3, 4, poison=((0, 2, "w1", float("nan")), (2, 0, "scale", float("inf")))
    ),
    "stale": schedules.Schedule((4,), 4, 5, lags=((1, 2, 1),), sits_out=((1, 0),)),
}


def feeds(schedule, states):
    """Inputs of each step, with the steps that the replicas' gradients are for."""
    return [{**feed, "local_steps": s.steps} for feed, s in zip(schedule.feeds(), states)]


# Without a model axis, whose cores take as long to build again; random schedules have one.
SHAPE = "rows:4;cols:1"


@functools.lru_cache(maxsize=None)
def program(kind, to_aggregate):
    """A step, for the runs of several schedules."""
    feed = {**SCHEDULES["stale"].feeds()[0], "local_steps": np.zeros(4, np.int64)}
    # Not Adam, which makes whole steps of gradients that are all rounding.
    build = step(to_aggregate, "momentum", SHAPE)
    return harness.built(kind, SHAPE, LAYOUT, build, feed)


# Those of few programs; random schedules have more (tests/properties).
ON_PLACEMENT = ["all contribute", "backup replicas", "not finite", "stale"]


@pytest.mark.parametrize(
    ("kind", "name"),
    harness.on_both([(name,) for name in sorted(SCHEDULES)], [(name,) for name in ON_PLACEMENT]),
)
@pytest.mark.mostly_slow
def test_equals_the_model(kind, name):
    schedule = SCHEDULES[name]
    states = list(schedules.replay(schedule, reference.OPTIMIZERS["momentum"](), 0.9))
    made = program(kind, schedule.replicas_to_aggregate)
    check(made.run(feeds(schedule, states)), states)


@pytest.mark.slow
def test_too_many_steps_without_update_name_the_replicas():
    schedule = schedules.Schedule((4,), 8, 3, sits_out=((0, 2), (1, 2), (2, 2), (2, 1)))
    states = list(schedules.replay(schedule, reference.OPTIMIZERS["sgd"]()))
    build = step(8, "sgd", SHAPE, max_steps_without_update=1)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"max_steps_without_update=1.*\[2\]"):
        harness.run("placement", SHAPE, LAYOUT, build, feeds(schedule, states))
