"""Weighted means: shards, microbatch steps and islands with unequal numbers of tokens.

Everything is compared with one device in numpy float64, which takes the mean over all tokens. Their
numbers differ so much that a mean of means is off by several percent.
"""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness
from tests.optimizers.pipeline.test_order import BATCH_DIMS, LAYOUT, SHAPE, TABLE, order_table

SHARDS, LENGTH, FEATURES, RATE = 4, 8, 4, 0.1  # the table's optimizer is plain descent at that rate
START = np.array([0.5, -1.0, 0.25, 2.0], np.float32)
ACCUMULATION = [name for name in order_table.WRAPPERS if name.startswith("GradientAcc")]
# Steps round numbers below 4 in sums of some 64 products.
CLOSE = 64 * 2.0**-22


def batches(counts, seed=1):
    """For each step the tokens of each shard, by their numbers; the others are padding."""
    rng, feeds = np.random.RandomState(seed), []
    for step in counts:
        x = rng.randn(SHARDS, LENGTH, FEATURES).astype("f")
        mask = (np.arange(LENGTH) < np.asarray(step)[:, None]).astype("f")
        feeds.append({"x": 0.5 * x, "mask": mask})
    return feeds


UNEQUAL = [[8, 1, 3, 2], [1, 1, 2, 1], [5, 8, 8, 7], [2, 6, 1, 4], [8, 8, 1, 1], [1, 3, 1, 8]]
WITH_EMPTY = [[8, 0, 3, 2], [0, 0, 0, 0], [0, 8, 0, 7], [2, 6, 1, 4], [0, 0, 0, 0], [0, 0, 0, 0]]


def sums_of_shards(w, feed):
    """For each shard the sum of its tokens' gradients, and their number."""
    found = []
    for x, mask in zip(feed["x"].astype("d"), feed["mask"].astype("d")):
        found.append((2 * (mask * (x @ w - 1.0)) @ x, mask.sum()))
    return found


def joined(parts):
    total = sum(weight for _, weight in parts)
    return (sum(g for g, _ in parts) / total if total else None), total


class Stack:
    """What a stack of wrappers of the table does, from the outside in, with the parts of a step."""

    def __init__(self, names, passes=2, average=False, norm=1.0, masked=None):
        self.names, self.passes, self.average, self.norm = names, passes, average, norm
        self.masked, self.kept, self.count, self.without_data = masked, [], 0, 0
        self.outer, self.velocity, self.updates = START.astype("d"), 0.0, 0

    def __call__(self, w, parts, names=None):
        names = self.names if names is None else names
        if not names:
            grad, total = joined(parts)
            self.without_data += total == 0
            return (w - RATE * grad, total) if total else (w, 0)
        name, inside = names[0], names[1:]
        if name.startswith("Outer"):  # one island
            w, total = self(w, parts, inside)
            self.updates += total > 0
            if total and self.updates % 2 == 0:
                self.velocity = 0.5 * self.velocity + self.outer - w
                w = self.outer - 0.7 * (self.outer - w + 0.5 * self.velocity)
                self.outer = w
            return w, total
        if name.startswith("GradientAcc"):
            self.kept += parts
            self.count += 1
            if self.count < self.passes:
                return w, 0
            factor = 1 if self.average else self.count
            parts, self.kept, self.count = self.kept, [], 0
            parts = [(g * factor, weight) for g, weight in parts]
        elif name.startswith("Clip"):
            grad, total = joined(parts)
            if total:
                grad = grad * min(1.0, self.norm / np.linalg.norm(grad))
                parts = [(grad * total, total)]
        elif name.startswith("Sync"):
            parts = [x for i, x in enumerate(parts) if self.masked is None or self.masked[i]]
            parts = [x for x in parts if x[1]]
            if len(parts) < 2:  # of the table; what comes is kept, which no case here has
                assert not parts
                return w, 0
        return self(w, parts, inside)


def train(stack, feeds, **how):
    """The variable at the end, and how many updates had no data."""
    w = START.astype("d")
    stack = [name for name in stack if name != "AverageOptimizer"]
    if "OuterOptimizer" in stack:
        return islands(stack[1:], feeds, 2, **how), None
    model = Stack(stack, **how)
    for feed in feeds:
        w, _ = model(w, sums_of_shards(w, feed))
    is_outer = any(name.startswith("Outer") for name in stack)
    return model.outer if is_outer else w, model.without_data


def islands(stack, feeds, number, **how):
    """Islands of equally many shards, with an outer step every two updates."""
    models, size = [Stack(stack, **how) for _ in range(number)], SHARDS // number
    outer, velocity, count = START.astype("d"), 0.0, 0
    own, weights = [outer] * number, np.zeros(number)
    for feed in feeds:
        moved = [
            model(w, sums_of_shards(w, feed)[size * i : size * (i + 1)])
            for i, (model, w) in enumerate(zip(models, own))
        ]
        own, weights = [w for w, _ in moved], weights + [total for _, total in moved]
        count += any(total for _, total in moved)
        if any(total for _, total in moved) and count % 2 == 0:
            difference = sum(x * (outer - w) for x, w in zip(weights, own)) / weights.sum()
            velocity = 0.5 * velocity + difference
            outer = outer - 0.7 * (difference + 0.5 * velocity)
            own, weights = [outer] * number, np.zeros(number)
    return outer


def program(make, how="shards", dims=BATCH_DIMS, sizes=(2, 2), own=False):
    """A step on token means: of each shard, or of all, by weights with shard dims or a scalar."""

    def build(mesh, inputs):
        batch = [mtf.Dimension(*x) for x in zip(dims, sizes)]
        token, features = mtf.Dimension("token", LENGTH), mtf.Dimension("in", FEATURES)
        given = [mtf.Shape([*batch, token, features]), mtf.Shape([*batch, token])]
        x, mask = (
            mtf.import_tf_tensor(mesh, tf.reshape(inputs[k], shape.to_integer_list), shape)
            for k, shape in zip(("x", "mask"), given)
        )
        first = tf.constant_initializer(START)
        w = mtf.get_variable(mesh, "w", mtf.Shape([features]), initializer=first)
        errors = mtf.square(mtf.einsum([x, w], given[1]) - 1.0) * mask
        shape = mtf.Shape(batch if how == "shards" else [])
        counts = mtf.reduce_sum(mask, output_shape=mtf.Shape(batch))
        loss = mtf.reduce_sum(errors, output_shape=shape)
        loss /= counts if how == "shards" else mtf.reduce_sum(counts)
        weights = mtf.reduce_sum(counts) if how == "scalar" else counts
        opt = make()
        if own:  # gradients of the program's own
            variables = mesh.graph.trainable_variables
            grads = mtf.gradients([loss], [v.value for v in variables])
            updates = opt.apply_grads(grads, variables, weights=weights)
        else:
            pairs = opt.compute_gradients(loss, weights=weights)
            updates = opt.apply_grads(*zip(*pairs))
        return updates, {k: v for k, v in gs.reported(opt).items() if "data" in k}

    return build


def run(kind, make, feeds, shape=SHAPE, layout=LAYOUT, **how):
    return harness.run(kind, shape, layout, program(make, **how), feeds)


def assert_close(found, expected, steps=6):
    np.testing.assert_allclose(found.variables["w"], expected, rtol=0, atol=steps * CLOSE)


def made(*names):
    def make():
        opt = order_table.plain()
        if "ShardedUpdateOptimizer" not in names:  # of the others, some do not know the shards
            opt = gs.CrossShardOptimizer(opt, name="knows", batch_dims=BATCH_DIMS)
        for name in reversed(names):
            opt = order_table.WRAPPERS[name](opt)
        return opt

    return make


@pytest.mark.parametrize("how", ["shards", "shards of all", "scalar"])
@pytest.mark.parametrize("name", order_table.WRAPPERS)
def test_every_wrapper(mesh_kind, name, how):
    if name == "OuterOptimizer" and how == "scalar":
        return  # a scalar says that islands have equally many
    feeds = batches(UNEQUAL)
    expected, _ = train([name], feeds)
    assert_close(run(mesh_kind, made(name), feeds, how=how), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("outer", "inner"), sorted(p for p, why in TABLE.items() if not why))
def test_every_pair(outer, inner):
    feeds = batches(UNEQUAL)
    expected, _ = train([outer, inner], feeds)
    assert_close(run("simd", made(outer, inner), feeds), expected)


def accumulation(where, passes=3, inner=order_table.plain, **more):
    def make():
        place = {"accumulate": where, **(order_table.MESH if where == "local" else {})}
        place["batch_dims"] = BATCH_DIMS
        return gs.GradientAccumulationOptimizer(inner(), passes, True, **{**place, **more})

    return make


@pytest.mark.parametrize("where", ["local", "synced"])
def test_three_microbatches_of_four_shards(mesh_kind, where):
    """As one device with the whole batch, where a mean of means is off by several percent."""
    feeds = batches(UNEQUAL)
    expected, _ = train(["GradientAccumulation"], feeds, passes=3, average=True)
    w = START.astype("d")
    for whole in (feeds[:3], feeds[3:]):
        parts = [part for feed in whole for part in sums_of_shards(w, feed)]
        w = w - RATE * joined(parts)[0]
    np.testing.assert_allclose(w, expected, rtol=1e-12)
    assert_close(run(mesh_kind, accumulation(where), feeds), expected)
    means = [np.mean([g / max(n, 1) for g, n in sums_of_shards(w, f)], 0) for f in feeds[3:]]
    whole = joined([part for f in feeds[3:] for part in sums_of_shards(w, f)])[0]
    assert np.linalg.norm(np.mean(means, 0) - whole) > 0.05 * np.linalg.norm(whole)


# Wrappers to whose stacks a step without data, and shards without, are no trouble.
EMPTY = {
    "cross_shard": (lambda opt: gs.CrossShardOptimizer(opt, **order_table.MESH), ["Cross"]),
    "loss_scale": (
        lambda opt: gs.LossScaleOptimizer(gs.AverageOptimizer(opt, 0.5), **order_table.MESH),
        ["LossScale"],
    ),
    "clip": (
        lambda opt: gs.ClipByGlobalNormOptimizer(opt, 1.0, **order_table.MESH),
        ["ClipByGlobalNorm"],
    ),
    "sharded": (order_table.WRAPPERS["ShardedUpdateOptimizer"], ["Sharded"]),
    "local": (lambda opt: accumulation("local", 2, lambda: opt)(), ["GradientAcc"]),
    "skipping": (
        lambda opt: accumulation(
            "local", 2, lambda: opt, should_skip_update_fn=gs.skip_not_finite
        )(),
        ["GradientAcc"],
    ),
    "synced": (
        lambda opt: gs.LossScaleOptimizer(
            gs.GradientAccumulationOptimizer(
                opt, 2, True, should_skip_update_fn=gs.skip_not_finite, accumulate="synced"
            ),
            **order_table.MESH,
        ),
        ["GradientAcc"],
    ),
    "replicas": (
        lambda opt: gs.SyncReplicasOptimizer(opt, 1, **order_table.MESH),
        ["SyncReplicas"],
    ),
    "islands": (
        lambda opt: gs.OuterOptimizer(
            opt, 2, outer_dims=("outer",), leave_out_not_finite=True, **order_table.MESH
        ),
        ["OuterOptimizer"],
    ),
}


@pytest.mark.parametrize("name", EMPTY)
def test_no_data_is_no_nan(mesh_kind, name):
    """The loss of a shard without tokens is 0 / 0 here, and so are its gradients."""
    wrap, does = EMPTY[name]
    feeds = batches(WITH_EMPTY)
    expected, without_data = train(does, feeds, passes=2, average=True)
    found = run(mesh_kind, lambda: wrap(order_table.plain()), feeds)
    assert np.isfinite(expected).all()
    assert_close(found, expected)
    if name in ("cross_shard", "loss_scale", "clip", "sharded"):
        assert [f["updates_without_data"] for f in found.fetched] == [0, 1, 1, 1, 2, 3]
    elif name != "islands":
        assert found.fetched[-1]["updates_without_data"] == without_data
    skipped = [v for k, v in found.variables.items() if k.endswith("/skipped")]
    assert not np.any(skipped)
    scales = [v for k, v in found.variables.items() if k.endswith("/scale")]
    assert all(scale == 2.0**15 for scale in scales)
