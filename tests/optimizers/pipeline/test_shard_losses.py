"""A loss for each shard trains as the scalar loss does, in every stack and order of wrappers."""

import random

import numpy as np
import pytest

from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models
from tests.optimizers.pipeline import stack_reference
from tests.optimizers.pipeline.shard_losses import (
    FEATURES,
    GROUPS,
    LOCAL,
    SHARDS,
    START,
    assert_close,
    batch_dims,
    batches,
    check,
    expected,
    gradients,
    make,
    specs,
    trained,
)
from tests.wrappers import LAYOUT, SHAPE, TABLE, WORKS, order_table

CROSS_SHARD = "CrossShardOptimizer"


def on_both(every, on_placement):
    """As `harness.on_both`, of stacks."""
    cases = harness.on_both([(stack,) for stack in every], [(stack,) for stack in on_placement])
    return [
        pytest.param(kind, stack, id=f"{kind}-{' around '.join(stack)}") for kind, stack in cases
    ]


# The others are trained with weights, in tests/optimizers/test_weights.py.
@pytest.mark.parametrize(("kind", "stack"), on_both(WORKS[1::2], WORKS[1::12]))
@pytest.mark.mostly_slow(every=24, keep="simd")
def test_every_second_pair_that_the_table_allows(kind, stack):
    check(kind, stack, ["shards"])


@pytest.mark.parametrize("name", order_table.WRAPPERS)
@pytest.mark.mostly_slow(keep="simd")
def test_every_wrapper_alone(mesh_kind, name):
    check(mesh_kind, [name], ["scalar", "shards"])


def some_of_three(number):
    rng, names, found = random.Random(3), list(order_table.WRAPPERS), []
    while len(found) < number:
        stack = [rng.choice(names) for _ in range(3)]
        orders = [(stack[i], stack[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
        if all(TABLE[order] is None for order in orders) and stack not in found:
            found.append(stack)
    return found


@pytest.mark.parametrize(("kind", "stack"), on_both(some_of_three(12), some_of_three(3)))
@pytest.mark.mostly_slow
def test_some_stacks_of_three(kind, stack):
    check(kind, stack, ["shards"])


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


@pytest.mark.parametrize(("kind", "stack"), on_both(SUMS, SUMS[::4]))
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

    def __call__(self, values, parts):
        ((grads, weight),) = parts
        sums = grads["w"].copy()
        for group in self.groups:
            sums[group] = grads["w"][group].sum(0)
        return self.inside(values, [({"w": sums}, weight)])


def expected_copies(stack, feeds, factor=1.0):
    """All copies, a row each, in float64; those that are summed are summed once."""
    (layer,) = stack_reference.layers_of([], "sgd", SHARDS)
    sums = [name for name in stack if name in ("knows", "groups")]
    for number, name in reversed(list(enumerate(stack))):
        for spec in specs([name]):
            layer = stack_reference.LAYERS[spec.kind](layer, **spec.arguments)
        if name in sums and name not in stack[:number]:
            layer = SumOfCopies(layer, GROUPS if name == "groups" else [list(range(SHARDS))])
    values = {"w": np.tile(START.astype(np.float64), (SHARDS, 1))}
    for feed in feeds:
        copies = np.stack(gradients(values["w"], feed)) * (factor / SHARDS)
        values, _ = layer(values, [({"w": copies}, 1.0)])
    return values["w"]


OF_COPIES = {
    "AverageOptimizer", "LossScaleOptimizer", LOCAL, "GradientAccumulationOptimizer, synced",
    "ClipByGlobalNormOptimizer", CROSS_SHARD,
}  # fmt: skip


PAIRS_OF_COPIES = [
    tuple("knows" if name == CROSS_SHARD else name for name in pair)
    for pair in WORKS
    if OF_COPIES.issuperset(pair) and {CROSS_SHARD, LOCAL}.intersection(pair)
]


@pytest.mark.parametrize(("kind", "stack"), on_both(PAIRS_OF_COPIES, PAIRS_OF_COPIES[::6]))
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


@pytest.mark.parametrize(("kind", "stack"), on_both(GROUPED, GROUPED[::3]))
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
        w = models.variable(mesh, "w", [mtf.Dimension("in", FEATURES)], START)
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
