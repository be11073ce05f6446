"""Stacks that train with a loss for each shard, against numpy."""

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness
from tests.optimizers.pipeline import stack_reference
from tests.wrappers import BATCH_DIMS, LAYOUT, SHAPE, order_table

SUM, MEAN = tf.losses.Reduction.SUM, tf.losses.Reduction.MEAN


SHARDS, FEATURES, STEPS = 4, 4, 4


START = np.array([0.5, -1.0, 0.25, 2.0], np.float32)


# Up to four updates, each with sums of 64 products, on numbers below 4.
CLOSE = STEPS * 64 * 2.0**-24


GROUPS = [[0, 3], [2, 1]]


MASK = [True, False, True, True]


WRAPPERS = {
    **order_table.WRAPPERS,
    "SUM": lambda opt: gs.CrossShardOptimizer(opt, SUM),
    "masked": lambda opt: gs.SyncReplicasOptimizer(opt, 2, contributes=MASK, **order_table.MESH),
    "knows": lambda opt: gs.CrossShardOptimizer(opt, batch_dims=BATCH_DIMS),
    "groups": lambda opt: gs.CrossShardOptimizer(
        opt, MEAN, "groups", GROUPS, batch_dims=BATCH_DIMS
    ),
}


def batches(per_shard=2):
    """Each shard has some losses, each the mean of two examples."""
    rng = np.random.RandomState(1)
    shape = (2, 2 * per_shard, 2, FEATURES)
    return [{"x": 0.25 * rng.randn(*shape).astype("f")} for _ in range(STEPS)]


def gradients(w, feed):
    """Each shard's own of the mean of `(x w - 1)^2`, in float64."""
    shards = feed["x"].astype(np.float64).reshape(SHARDS, -1, FEATURES)
    rows = np.broadcast_to(w, (SHARDS, FEATURES))
    return [2 * (x @ row - 1) @ x / len(x) for x, row in zip(shards, rows)]


# Of names that are no wrapper's.
_LIKE = {"masked": "SyncReplicasOptimizer"}


def specs(stack):
    return stack_reference.specs_of([_LIKE.get(name, name) for name in stack])


def expected(stack, feeds, factor=1.0):
    """The variable after training with `factor` times the mean of all losses, in float64."""
    islands = 2 if "OuterOptimizer" in stack else int(any(x.startswith("Outer") for x in stack))

    def layers():
        made = stack_reference.layers_of(specs(stack), "sgd", SHARDS // (islands or 1))
        for layer in made[:-1]:
            layer.mask = MASK if "masked" in stack else [True] * SHARDS
        return made

    def parts_of(feed):
        return lambda values: [({"w": g * factor}, 1.0) for g in gradients(values["w"], feed)]

    model = stack_reference.Islands(layers, islands, {"w": START.astype(np.float64)})
    for feed in feeds:
        model(parts_of(feed))
    return model.outer["w"]


def make(stack, suffix=""):
    opt = order_table.plain()
    for name in reversed(stack):
        opt = WRAPPERS[name](opt)
        opt.name += suffix
    return opt


def batch_dims(sizes):
    return [mtf.Dimension(*x) for x in zip(BATCH_DIMS, sizes)]


def loss_along(names, mesh, x, w):
    """The losses for each shard along some of the batch dims, the mean over the others."""
    dims = batch_dims(x.shape.as_list())
    rest = [mtf.Dimension("example", 2), mtf.Dimension("in", FEATURES)]
    x = mtf.import_tf_tensor(mesh, x, mtf.Shape([*dims, *rest]))
    residual = mtf.einsum([x, w], mtf.Shape([*dims, rest[0]])) - 1.0
    kept = mtf.Shape([d for d in dims if d.name in names])
    return mtf.reduce_mean(mtf.square(residual), output_shape=kept)


def trained(kind, stack, feeds, own_copies=False, losses=("scalar", "shards")):
    """Variables after training, one by the scalar loss and one by the loss for each shard."""

    def build(mesh, inputs):
        updates = []
        for which in losses:
            opt = make(stack, f"_{which}")
            # Where the table gives no wrapper the mesh, they all know of "batch" alone.
            knows = any(w.axes for w in opt._wrappers()) or {"knows", "groups"} & {*stack}
            names = {"scalar": (), "shards": BATCH_DIMS if knows else ("batch",)}[which]
            dims = batch_dims([2, 2]) if own_copies else []
            shape = mtf.Shape([*dims, mtf.Dimension("in", FEATURES)])
            start = np.broadcast_to(START, shape.to_integer_list)
            w = mtf.get_variable(mesh, which, shape, initializer=tf.constant_initializer(start))
            step = tf.get_variable(f"step_{which}", [], tf.int64, trainable=False)
            loss = loss_along(names, mesh, inputs["x"], w)
            updates += opt.minimize(loss, step, [w.operation])
        return updates, {}

    variables = harness.run(kind, SHAPE, LAYOUT, build, feeds).variables
    return [variables[which] for which in losses]


def assert_close(found, right):
    np.testing.assert_allclose(found, right, rtol=0, atol=CLOSE)


def check(kind, stack, losses=("scalar", "shards")):
    feeds = batches()
    right = expected(stack, feeds)
    for found in trained(kind, stack, feeds, losses=losses):
        assert_close(found, right)
    # Another scale would show: a clip, say, hides that of gradients that are clipped anyway.
    assert np.abs(right - expected(stack, feeds, factor=2.0)).max() > 0.01


LOCAL = "GradientAccumulationOptimizer, local"
