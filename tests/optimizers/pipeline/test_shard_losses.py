"""A loss for each shard trains as the scalar loss does, in every stack and order of wrappers."""

import random

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness
from tests.optimizers.pipeline import stack_reference
from tests.optimizers.pipeline.stack_reference import Spec
from tests.optimizers.pipeline.test_order import (
    BATCH_DIMS,
    LAYOUT,
    ON_PLACEMENT,
    SHAPE,
    TABLE,
    WORKS,
    order_table,
)

SUM, MEAN = tf.losses.Reduction.SUM, tf.losses.Reduction.MEAN
SHARDS, FEATURES, STEPS = 4, 4, 4
START = np.array([0.5, -1.0, 0.25, 2.0], np.float32)
# Up to four updates, each with sums of 64 products, on numbers below 4.
CLOSE = STEPS * 64 * 2.0**-24
GROUPS = [[0, 3], [2, 1]]
MASK = [True, False, True, True]

CROSS_SHARD = "CrossShardOptimizer"
WRAPPERS = {
    **order_table.WRAPPERS,
    "SUM": lambda opt: gs.CrossShardOptimizer(opt, SUM),
    "masked": lambda opt: gs.SyncReplicasOptimizer(opt, 2, contributes=MASK, **order_table.MESH),
    "knows": lambda opt: gs.CrossShardOptimizer(opt, batch_dims=BATCH_DIMS),
    "groups": lambda opt: gs.CrossShardOptimizer(
        opt, MEAN, "groups", GROUPS, batch_dims=BATCH_DIMS
    ),
}
# What they do to gradients and updates, in `stack_reference`; the others do nothing to values.
REPLICAS = {"replicas_to_aggregate": 2, "decay": None, "accept_summed": False}
PASSES = {"backward_passes_per_step": 2, "average_aggregated_gradients": False}
SPECS = {
    "ClipByGlobalNormOptimizer": Spec("ClipByGlobalNormOptimizer", {"clip_norm": 1.0}),
    "SyncReplicasOptimizer": Spec("SyncReplicasOptimizer", REPLICAS),
    "masked": Spec("SyncReplicasOptimizer", REPLICAS),
    **{
        name: Spec("GradientAccumulationOptimizer", {**PASSES, "skips": "skip" in name})
        for name in WRAPPERS
        if name.startswith("GradientAccumulationOptimizer")
    },
}


def batches(per_shard=2):
    """Each shard has some losses, each the mean of two examples."""
    rng = np.random.RandomState(1)
    shape = (2, 2 * per_shard, 2, FEATURES)
    return [{"x": 0.25 * rng.randn(*shape).astype("f")} for _ in range(STEPS)]


def terms(w, feed):
    """What each shard adds to the gradient of `mean((x w - 1)^2)`, in float64."""
    shards = feed["x"].astype(np.float64).reshape(SHARDS, -1, FEATURES)
    rows = np.broadcast_to(w, (SHARDS, FEATURES))
    return [2 * (x @ row - 1) @ x / (SHARDS * len(x)) for x, row in zip(shards, rows)]


def expected(stack, feeds, factor=1.0):
    """The variable after training with `factor` times the mean of all losses, in float64."""
    specs = [SPECS[name] for name in stack if name in SPECS]
    islands = 2 if "OuterOptimizer" in stack else 1
    has_rounds = any(name.startswith("OuterOptimizer") for name in stack)
    size = SHARDS // islands
    chains = [stack_reference.layers_of(specs, "sgd", size) for _ in range(islands)]
    for layer in chains[0][:-1]:
        layer.mask = MASK if "masked" in stack else [True] * SHARDS
    outer, velocity, count = START.astype(np.float64), 0.0, 0
    own = [outer] * islands
    for feed in feeds:
        for island, (chain, w) in enumerate(zip(chains, own)):
            mine = terms(w, feed)[size * island : size * (island + 1)]
            values, updated = chain[0]({"w": w}, [{"w": g * islands * factor} for g in mine])
            own[island] = values["w"]
        count += updated
        if has_rounds and updated and count % 2 == 0:
            difference = outer - np.mean(own, 0)
            velocity = 0.5 * velocity + difference
            outer = outer - 0.7 * (difference + 0.5 * velocity)
            own = [outer] * islands
    return outer if has_rounds else own[0]


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


def trained(kind, stack, feeds, own_copies=False):
    """Two variables after training, by the scalar loss and by the loss for each shard."""

    def build(mesh, inputs):
        updates = []
        for which in ("scalar", "shards"):
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
    return variables["scalar"], variables["shards"]


def assert_close(found, right):
    np.testing.assert_allclose(found, right, rtol=0, atol=CLOSE)


def check(kind, stack):
    feeds = batches()
    right = expected(stack, feeds)
    for found in trained(kind, stack, feeds):
        assert_close(found, right)
    # Another scale would show: a clip, say, hides that of gradients that are clipped anyway.
    assert np.abs(right - expected(stack, feeds, factor=2.0)).max() > 0.01


def on_both(every, on_placement):
    """As `harness.on_both`, of stacks."""
    cases = harness.on_both([(stack,) for stack in every], [(stack,) for stack in on_placement])
    return [
        pytest.param(kind, stack, id=f"{kind}-{' around '.join(stack)}") for kind, stack in cases
    ]


@pytest.mark.parametrize(("kind", "stack"), on_both(WORKS, ON_PLACEMENT))
@pytest.mark.mostly_slow(every=43)
def test_every_pair_that_the_table_allows(kind, stack):
    check(kind, stack)


@pytest.mark.parametrize("name", order_table.WRAPPERS)
@pytest.mark.mostly_slow
def test_every_wrapper_alone(mesh_kind, name):
    check(mesh_kind, [name])


def some_of_three(number):
    rng, names, found = random.Random(3), list(order_table.WRAPPERS), []
    while len(found) < number:
        stack = [rng.choice(names) for _ in range(3)]
        orders = [(stack[i], stack[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
        if all(TABLE[order] is None for order in orders) and stack not in found:
            found.append(stack)
    return found


@pytest.mark.parametrize(("kind", "stack"), on_both(some_of_three(12), some_of_three(4)))
@pytest.mark.mostly_slow
def test_some_stacks_of_three(kind, stack):
    check(kind, stack)


SUMS = [
    ("SUM",),
    ("LossScaleOptimizer", "SUM"),
    ("SUM", "LossScaleOptimizer"),
    ("GradientAccumulationOptimizer, local", "SUM"),
    ("SyncReplicasOptimizer", "SUM"),
    ("masked", "SUM"),
    ("OuterOptimizer", "SUM"),
    ("AverageOptimizer", "OuterOptimizer", "SUM"),
]


@pytest.mark.parametrize(("kind", "stack"), on_both(SUMS, SUMS[::3]))
@pytest.mark.mostly_slow
def test_a_sum_is_the_sum_wherever_it_is_asked_for(kind, stack):
    """Of replicas that are skipped, the average of the others stands in their place."""
    feeds = batches()
    knows = len(stack) > 1 and "LossScaleOptimizer" not in stack
    scalar, shards = trained(kind, stack, feeds)
    assert_close(scalar, expected(stack, feeds))
    # Four losses along "batch", on each of two along "outer".
    assert_close(shards, expected(stack, feeds, factor=8.0 if knows else 4.0))


# Variables of which every shard has its own copy.


class SumOfCopies:
    """In numpy: the gradient of a shard's copy becomes the sum over the shard's group."""

    def __init__(self, inside, groups):
        self.inside, self.groups = inside, groups

    def __call__(self, values, shards):
        sums = shards[0]["w"].copy()
        for group in self.groups:
            sums[group] = shards[0]["w"][group].sum(0)
        return self.inside(values, [{"w": sums}])


def expected_copies(stack, feeds, factor=1.0):
    """All copies, a row each, in float64; those that are summed are summed once."""
    (layer,) = stack_reference.layers_of([], "sgd", SHARDS)
    sums = [name for name in stack if name in ("knows", "groups")]
    for number, name in reversed(list(enumerate(stack))):
        if name in SPECS:
            spec = SPECS[name]
            layer = stack_reference.LAYERS[spec.kind](layer, **spec.arguments)
        elif name in sums and name not in stack[:number]:
            layer = SumOfCopies(layer, GROUPS if name == "groups" else [list(range(SHARDS))])
    values = {"w": np.tile(START.astype(np.float64), (SHARDS, 1))}
    for feed in feeds:
        values, _ = layer(values, [{"w": np.stack(terms(values["w"], feed)) * factor}])
    return values["w"]


LOCAL = "GradientAccumulationOptimizer, local"
OF_COPIES = {
    "AverageOptimizer", "LossScaleOptimizer", LOCAL, "GradientAccumulationOptimizer, synced",
    "ClipByGlobalNormOptimizer", CROSS_SHARD,
}  # fmt: skip


PAIRS_OF_COPIES = [
    tuple("knows" if name == CROSS_SHARD else name for name in pair)
    for pair in WORKS
    if OF_COPIES.issuperset(pair) and {CROSS_SHARD, LOCAL}.intersection(pair)
]


@pytest.mark.parametrize(("kind", "stack"), on_both(PAIRS_OF_COPIES, PAIRS_OF_COPIES[::3]))
@pytest.mark.mostly_slow
def test_copies_that_shards_have_of_a_variable(kind, stack):
    feeds = batches(per_shard=1)
    right = expected_copies(stack, feeds)
    for found in trained(kind, stack, feeds, own_copies=True):
        assert_close(found.reshape(SHARDS, FEATURES), right)
    assert np.abs(right - expected_copies(stack, feeds, factor=2.0)).max() > 0.01


GROUPED = [
    ("groups",),
    ("AverageOptimizer", "groups"),
    ("LossScaleOptimizer", "groups"),
    (LOCAL, "groups"),
    ("groups", "groups"),
    ("groups", "AverageOptimizer"),
]


@pytest.mark.parametrize(("kind", "stack"), on_both(GROUPED, GROUPED[::2]))
@pytest.mark.mostly_slow
def test_the_mean_over_a_group_of_copies_wherever_the_groups_are_given(kind, stack):
    feeds = batches(per_shard=1)
    scalar, shards = trained(kind, stack, feeds, own_copies=True)
    assert_close(scalar.reshape(SHARDS, FEATURES), expected_copies(stack, feeds))
    # A scalar is the mean over all four shards, and a group has two.
    right = expected_copies(stack, feeds, factor=2.0)
    assert_close(shards.reshape(SHARDS, FEATURES), right)


@pytest.mark.parametrize("stack", [("LossScaleOptimizer", "knows"), (LOCAL,)], ids=" around ".join)
@pytest.mark.mostly_slow
def test_a_loop_over_microbatches(mesh_kind, stack):
    """Each microbatch's losses are the mean over its examples: their gradients are halved."""
    feeds = batches()

    def build(mesh, inputs):
        opt = make(stack)
        w = mtf.get_variable(
            mesh, "w", [mtf.Dimension("in", FEATURES)], initializer=tf.constant_initializer(START)
        )
        parts = tf.stack(tf.split(inputs["x"], 2, 2), 0)
        micro = mtf.Dimension("micro", 2)
        sizes = inputs["x"].shape.as_list()
        dims = [*batch_dims(sizes), mtf.Dimension("example", 1), mtf.Dimension("in", FEATURES)]
        parts = mtf.import_tf_tensor(mesh, parts, mtf.Shape([micro, *dims]))

        def body(number):
            x = mtf.gather(parts, number, micro)
            residual = mtf.einsum([x, w], mtf.Shape(dims[:-1])) - 1.0
            loss = mtf.reduce_mean(mtf.square(residual), output_shape=mtf.Shape(dims[:2]))
            ((grad, _),) = opt.compute_gradients(loss * 0.5, [w.operation])
            return [number + 1, grad]

        start = mtf.constant(mesh, 0, dtype=tf.int32)
        _, grad = mtf.while_loop(
            lambda number: mtf.less(number, 2), body, [start], has_accumulators=True
        )
        return opt.apply_grads([grad], [w.operation]), {}

    found = harness.run(mesh_kind, SHAPE, LAYOUT, build, feeds).variables["w"]
    assert_close(found, expected(stack, feeds))
