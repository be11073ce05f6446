"""gradient_noise_scale against a linear regression whose noise scale is known."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models
from tests.wrappers import wrap

INPUTS, NOISE = 6, 2.0
OFFSET = np.array([1.0, -0.5, 0.8, 0.3, -1.2, 0.6])  # w - w*
# For x ~ N(0, I), y = x w* + noise, the gradient of (x w - y)^2 / 2 by one example has the mean
# OFFSET and a covariance of this trace (Isserlis' theorem for the fourth moments of x).
TRACE = (INPUTS + 1) * np.square(OFFSET).sum() + INPUTS * NOISE**2
EXPECTED = TRACE / np.square(OFFSET).sum()


def batches(steps, batch):
    """Inputs, and what a model without weights has to predict: -x OFFSET + noise."""
    rng = np.random.RandomState(0)
    for _ in range(steps):
        x = rng.randn(batch, INPUTS)
        yield {
            "x": x.astype("f"),
            "y": (rng.randn(batch) * NOISE - x @ OFFSET).astype("f"),
        }


def losses(mesh, inputs, batch):
    """The loss of each example; the weights do not move from 0."""
    batch, dim = mtf.Dimension("batch", batch), mtf.Dimension("in", INPUTS)
    x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, dim]))
    y = mtf.import_tf_tensor(mesh, inputs["y"], mtf.Shape([batch]))
    w = mtf.get_variable(mesh, "w", mtf.Shape([dim]), initializer=tf.zeros_initializer())
    return mtf.square(mtf.einsum([x, w], [batch]) - y) * 0.5


def regression(mesh, inputs, batch):
    """The mean loss over a batch."""
    return mtf.reduce_mean(losses(mesh, inputs, batch))


def still():
    return mtf.optimize.SgdOptimizer(0.0)


# Stacks, and arguments of theirs. With a sum, the losses of the examples are given. Of synced
# accumulation it is the noise of its steps.
STACKS = {
    "cross_shard": {},
    "sharded": {},
    "sum of loss_scale(cross_shard)": {"reduction": tf.losses.Reduction.SUM},
    "loss_scale(cross_shard)": {},
    "clip": {"clip_norm": 0.01},
    "sum of local": {"average_aggregated_gradients": False},
    "local": {},
    "synced": {"average_aggregated_gradients": False},
}


def passes_of(stack):
    return 2 if "local" in stack else 1


def build(stack, axes, batch, decay):
    def step(mesh, inputs):
        given = STACKS[stack]
        optimizer = wrap(stack.removeprefix("sum of "), still(), {"axes": axes}, **given)
        loss = (losses if "reduction" in given else regression)(mesh, inputs, batch)
        updates = optimizer.minimize(loss)
        noise = gs.gradient_noise_scale(optimizer, batch * passes_of(stack), decay, axes=axes)
        return [*updates, *noise.updates], {"noise": noise.value}

    return step


def by_hand(feeds, shards, decay, passes):
    """The estimator of McCandlish et al. in float64."""
    trace = squared_norm = 0.0
    values = []
    for step, _ in enumerate(feeds):
        if (step + 1) % passes == 0:
            grads = [
                np.array_split(-feed["y"][:, None] * feed["x"].astype(float), shards)
                for feed in feeds[step + 1 - passes : step + 1]
            ]
            own = [np.mean(np.concatenate(shard), 0) for shard in zip(*grads)]
            big = sum(len(feed["y"]) for feed in feeds[:passes])
            small = big / shards
            of_shards = np.mean([np.square(g).sum() for g in own])
            whole = np.square(np.mean(own, 0)).sum()
            new = (of_shards - whole) / (1 / small - 1 / big)
            trace = trace * decay + new * (1 - decay)
            new = (big * whole - small * of_shards) / (big - small)
            squared_norm = squared_norm * decay + new * (1 - decay)
        values.append(trace / squared_norm if squared_norm else np.nan)
    return values


def test_the_analytic_value():
    layout = "all:4", "batch:all"
    steps, batch = 600, 128
    feeds = list(batches(steps, batch))
    # An average over all steps, nearly: the estimate's own error is then about 1%.
    step = build("cross_shard", gs.ReplicaAxes(*layout), batch, 0.998)
    result = harness.run("placement", *layout, step, feeds)
    assert abs(result.fetched[-1]["noise"] / EXPECTED - 1) < 0.05


@pytest.mark.parametrize(
    ("kind", "stack"),
    [
        *(("simd", stack) for stack in STACKS),
        ("placement", "cross_shard"),
        ("placement", "sum of local"),
        ("placement", "sharded"),
        ("xla", "sum of local"),
        ("xla", "loss_scale(cross_shard)"),
    ],
)
@pytest.mark.mostly_slow
def test_every_step(kind, stack):
    shape, layout, _ = harness.MESHES["2x2"]
    axes = gs.ReplicaAxes(shape, layout)
    feeds = list(batches(5, 8))
    result = harness.run(kind, shape, layout, build(stack, axes, 8, 0.9), feeds)
    found = [float(step["noise"]) for step in result.fetched]
    expected = by_hand(feeds, 2, 0.9, passes_of(stack))
    # Differences of squared norms lose a digit or two of float32's seven.
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_steps_that_are_not_finite_do_not_count():
    shape, layout, _ = harness.MESHES["2x2"]
    axes = gs.ReplicaAxes(shape, layout)
    feeds = list(batches(5, 8))
    bad = [dict(feed) for feed in feeds]
    bad[2]["y"] = np.full(8, np.inf, "f")
    found = harness.run(
        "simd", shape, layout, build("loss_scale(cross_shard)", axes, 8, 0.9), bad
    ).fetched
    expected = by_hand([*feeds[:2], *feeds[3:]], 2, 0.9, 1)
    np.testing.assert_allclose(found[-1]["noise"], expected[-1], rtol=1e-4)


def model(axes=None):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    inputs = {"x": tf.zeros([8, INPUTS]), "y": tf.zeros([8])}
    return regression(mesh, inputs, 8)


AXES = gs.ReplicaAxes("all:4", "batch:all")


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda: gs.CrossShardOptimizer(still()), {"batch_size": 0}, "batch_size must be"),
        (lambda: gs.CrossShardOptimizer(still()), {"decay": 1}, "decay must be"),
        (lambda: gs.CrossShardOptimizer(still()), {}, "were not summed over shards"),
        (
            lambda: gs.CrossShardOptimizer(still(), axes=gs.ReplicaAxes("all:1", "batch:all")),
            {},
            "on one shard",
        ),
        (
            lambda: gs.SyncReplicasOptimizer(still(), 4, axes=AXES),
            {},
            "skips gradients of some replicas",
        ),
    ],
)
def test_what_has_no_noise_scale(make, arguments, message):
    loss = model()
    optimizer = make()
    optimizer.apply_grads(
        [g for g, _ in optimizer.compute_gradients(loss)], loss.graph.trainable_variables
    )
    operations = list(loss.graph.operations)
    with pytest.raises(ValueError, match=message):
        gs.gradient_noise_scale(optimizer, **{"batch_size": 8, **arguments})
    assert loss.graph.operations == operations


def test_only_what_was_applied_at_once():
    loss = model()
    optimizer = gs.CrossShardOptimizer(still(), axes=AXES)
    ((grad, variable),) = optimizer.compute_gradients(loss)
    optimizer.apply_grad(grad, variable)
    optimizer.apply_grad(grad, variable)
    with pytest.raises(ValueError, match="got 2 in this graph"):
        gs.gradient_noise_scale(optimizer, 8)


def test_of_shards_that_were_clipped():
    shape, layout, _ = harness.MESHES["2x2"]
    axes, norm = gs.ReplicaAxes(shape, layout), 2.0
    feeds = list(batches(4, 8))

    def step(mesh, inputs):
        optimizer = gs.CrossShardOptimizer(still(), axes=axes)
        grads, variables = zip(*optimizer.compute_gradients(regression(mesh, inputs, 8)))
        clipped, _ = gs.clip_by_shard_norm(grads, norm, axes)
        updates = optimizer.apply_grads(clipped, variables)
        noise = gs.gradient_noise_scale(optimizer, 8, 0.0)
        return [*updates, *noise.updates], {"noise": noise.value}

    found = harness.run("simd", shape, layout, step, feeds).fetched
    for feed, value in zip(feeds, found):
        each = -feed["y"][:, None] * feed["x"].astype(float)
        parts = [shard.sum(0) / 8 for shard in np.array_split(each, 2)]
        parts = [g * min(1, norm / np.linalg.norm(g)) for g in parts]
        of_shards = np.mean([np.square(2 * g).sum() for g in parts])
        whole = np.square(np.sum(parts, 0)).sum()
        expected = (of_shards - whole) / (1 / 4 - 1 / 8) / ((8 * whole - 4 * of_shards) / (8 - 4))
        np.testing.assert_allclose(value["noise"], expected, rtol=1e-4)


def test_only_what_a_wrapper_has_applied():
    with pytest.raises(TypeError, match="wrap it"):
        gs.gradient_noise_scale(still(), 8)
    with pytest.raises(ValueError, match=r"Apply gradients by .* before you call"):
        gs.gradient_noise_scale(gs.CrossShardOptimizer(still()), 8)


def test_shards_that_are_not_recoverable():
    shape, layout, _ = harness.MESHES["2x2"]
    axes = gs.ReplicaAxes(shape, layout)
    loss = model()
    grads, variables = models.gradients(loss)
    clipped, _ = gs.clip_by_global_norm(grads, 1.0)
    optimizer = gs.CrossShardOptimizer(still(), axes=axes)
    optimizer.apply_grads(clipped, variables)
    with harness.unchanged(loss.graph), pytest.raises(ValueError, match="are not recoverable"):
        gs.gradient_noise_scale(optimizer, 8)
