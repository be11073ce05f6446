"""Wrappers with state on meshes with an axis that the batch is not split over.

Processors along that axis have the same state. Where they share copies of it, one of them writes
for all. Everything is compared with numpy in float64, in many sessions, as only some would show a
second writer; and the order of all accesses is proved from the graph.
"""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models
from tests.optimizers.pipeline import stack_reference
from tests.optimizers.pipeline.stack_reference import BATCH, HIDDEN, INPUTS, Spec
from tests.wrappers import KINDS as WRAPPERS
from tests.wrappers import parts, wrap

SESSIONS = 6
# Mesh, layout, batch dimensions, shards. On the last one, one variable is split and one is not.
MESHES = {
    "batch on b": ("a:2;b:2", "batch:b", ("batch",), 2),
    "batch on a": ("a:2;b:2", "batch:a", ("batch",), 2),
    "on both": ("a:2;b:2", "outer:a;batch:b", ("outer", "batch"), 4),
    "w split": ("a:2;b:2", "batch:b;in:a", ("batch",), 2),
    "four on b": ("a:2;b:4", "batch:b", ("batch",), 4),
}
KINDS = ["shared", "placement", "simd"]


def axes_of(mesh):
    return gs.ReplicaAxes(*MESHES[mesh][:3])


DECAY = 0.5
GIVEN = {
    "clip_norm": 0.05,
    "decay": DECAY,
    "loss_scale": "dynamic",
    "initial_scale": 1024.0,
    "growth_steps": 2,
}
STACKS = [
    "local",
    "synced",
    "replicas",
    "replicas, one more",
    "replicas(clip)",
    "average(loss_scale)",
    "loss_scale(replicas)",
    "local(sharded)",
]


def spec_of(part, given):
    """What numpy does as the wrapper; accumulation skips what is not finite."""
    kind = WRAPPERS[part]
    accumulates = kind.name == "GradientAccumulationOptimizer"
    more = {"accept_summed": False, **({"skips": True} if accumulates else {})}
    return Spec(kind.name, {**kind.given, **given, **more})


def feeds_for(shards):
    """Some steps; in the second and in the fifth a shard is masked, in the third one has a NaN."""
    rng = np.random.RandomState(2)
    feeds = []
    for _ in range(6):
        x, y = rng.randn(BATCH, INPUTS).astype("f"), rng.randn(BATCH, HIDDEN).astype("f")
        feeds.append({"x": x, "y": y, "contributes": np.ones(shards, bool)})
    feeds[1]["contributes"][1] = feeds[4]["contributes"][0] = False
    feeds[2]["y"][0, 0] = np.nan
    return feeds


def mean_squared_error(mesh, inputs, batch_dims):
    values = stack_reference.start()
    sizes = [BATCH] if len(batch_dims) == 1 else [2, BATCH // 2]
    dims = [mtf.Dimension(name, size) for name, size in zip(batch_dims, sizes)]
    features, hidden = mtf.Dimension("in", INPUTS), mtf.Dimension("hidden", HIDDEN)

    def given(name, dim):
        shape = mtf.Shape([*dims, dim])
        return mtf.import_tf_tensor(mesh, tf.reshape(inputs[name], shape.to_integer_list), shape)

    w, b = (
        models.variable(mesh, name, of, values[name])
        for name, of in (("w", [features, hidden]), ("b", [hidden]))
    )
    out = mtf.einsum([given("x", features), w], [*dims, hidden]) + b
    return mtf.reduce_mean(mtf.square(out - given("y", hidden)))


def trains_as_numpy(kind, mesh, stack, sessions=SESSIONS):
    mesh_shape, layout, batch_dims, shards = MESHES[mesh]
    stack, *more = stack.split(", ")
    given = {**GIVEN, "replicas_to_aggregate": shards + len(more)}
    specs = [spec_of(part, given) for part in parts(stack)]
    names = [f"wrapper_{number}" for number in range(len(specs))]

    def build(of, inputs):
        loss = mean_squared_error(of, inputs, batch_dims)
        opt = mtf.optimize.MomentumOptimizer(0.05, 0.9)
        contributes = tf.reshape(inputs["contributes"], [d.size for d in axes_of(mesh).shard_dims])
        for name, part in reversed([*zip(names, parts(stack))]):
            opt = wrap(
                part,
                opt,
                **given,
                name=name,
                axes=axes_of(mesh),
                should_skip_update_fn=gs.skip_not_finite,
                contributes=contributes,
                variable_averages=DECAY,
                variables_to_average=list(of.graph.trainable_variables),
            )
        return opt.minimize(loss, tf.train.get_or_create_global_step()), {"loss": loss}

    feeds = feeds_for(shards)
    start = stack_reference.start()
    expected = stack_reference.train(specs, names, "momentum", feeds, shards, start)
    made = harness.built(kind, mesh_shape, layout, build, feeds[0], autostack=False)
    assert not made.races()
    for _ in range(sessions if kind == "shared" else 1):
        found = made.run(feeds).variables
        for name, value in {**expected.values, **expected.state}.items():
            # Some thirty roundings a step, of numbers of this size.
            atol = 200 * 2.0**-24 * max(1, np.max(np.abs(value)))
            np.testing.assert_allclose(
                np.reshape(found[name], np.shape(value)), value, rtol=0, atol=atol, err_msg=name
            )
        assert found["global_step"] == expected.global_step


# With shared copies each stack on some mesh; elsewhere each wrapper once, in some stack.
CASES = [
    *(("shared", *pair) for pair in harness.pairs(MESHES, STACKS)),
    ("shared", "batch on b", "replicas"),
    ("placement", "w split", "replicas"),
    *(
        ("simd", "w split", name)
        for name in ("synced", "replicas(clip)", "average(loss_scale)", "local(sharded)")
    ),
]


@pytest.mark.parametrize(("kind", "mesh", "stack"), CASES)
@pytest.mark.mostly_slow
def test_a_stack_trains_as_numpy_does(kind, mesh, stack):
    trains_as_numpy(kind, mesh, stack)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_a_contribution_that_waits_counts_once(kind):
    """By hand: one of two contributions in the first step, and three in the second."""
    mesh, layout = "batch:2;model:4", "batch:batch"

    def build(of, inputs):
        x = mtf.import_tf_tensor(of, inputs["x"], mtf.Shape([mtf.Dimension("batch", 2)]))
        w = mtf.get_variable(of, "w", mtf.Shape([]), initializer=tf.zeros_initializer())
        opt = gs.SyncReplicasOptimizer(
            mtf.optimize.SgdOptimizer(1.0),
            2,
            contributes=inputs["ok"],
            mesh_shape=mesh,
            layout=layout,
        )
        return opt.minimize(mtf.reduce_mean(x * w), tf.train.get_or_create_global_step()), {}

    made = None
    for first in ([1.0, 5.0], [True, False]), ([1.0, np.nan], [True, True]):
        feeds = [
            {"x": np.array(x, "f"), "ok": np.array(ok)}
            for x, ok in (first, ([1.0, 1.0], [True, True]))
        ]
        made = made or harness.built(kind, mesh, layout, build, feeds[0], autostack=False)
        for _ in range(4 * SESSIONS if kind == "shared" else 1):
            assert [float(values["w"]) for values in made.after_each(feeds)] == [0.0, -1.0]
