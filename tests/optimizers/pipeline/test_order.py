"""The table of orders: it says what the wrappers do, and the page shows it."""

import collections
import contextlib
import functools
import re

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.pipeline.order import needs_shards
from mtf_gradsync.optimizers.pipeline.stack import stages_of
from tests import harness, models, wrappers
from tests.wrappers import BATCH_DIMS, LAYOUT, ROOT, SHAPE, TABLE, order_table


def test_every_wrapper_has_an_entry():
    """So that it is in the table and in every test of all wrappers."""
    entries = {name.partition(",")[0] for name in order_table.WRAPPERS}
    assert wrappers.exported() - entries == set(), "docs/write_order_table.py lacks these"
    assert wrappers.exported() - set(wrappers.REGISTRY) == set(), "tests/wrappers.py lacks these"
    kinds = {kind.name for kind in wrappers.KINDS.values()}
    assert wrappers.exported() - kinds == set(), "KINDS in tests/wrappers.py lacks these"


def test_the_page_is_what_the_wrappers_declare():
    assert (ROOT / "docs" / "order.md").read_text(encoding="utf-8") == order_table.page()


START = np.array([0.5, -1.0, 0.25, 2.0], np.float32)


def build(outer, inner):
    """A model, trained by two wrappers around each other."""
    make = order_table.WRAPPERS
    return build_by(lambda: make[outer](make[inner](order_table.plain())))


def build_by(make):
    """One variable, as what stands around what does not hang on how many there are."""

    def model(mesh, inputs):
        features = mtf.Dimension("in", len(START))
        batch = [mtf.Dimension(name, 2) for name in BATCH_DIMS]
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([*batch, features]))
        w = models.variable(mesh, "w", [features], START)
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, w], mtf.Shape(batch)) - 1.0))
        return make().minimize(loss, tf.train.get_or_create_global_step()), {"loss": loss}

    return model


def batches(steps):
    rng = np.random.RandomState(1)
    return [{"x": rng.randn(2, 2, len(START)).astype("f")} for _ in range(steps)]


@pytest.mark.parametrize(("outer", "inner"), sorted(p for p, why in TABLE.items() if why))
def test_what_the_table_refuses_is_refused_in_its_words(outer, inner):
    make = order_table.WRAPPERS
    one = make[inner](order_table.plain())
    names = {"outer": outer.split(",")[0], "inner": inner.split(",")[0]}
    request = needs_shards(stages_of(one))
    reason = TABLE[outer, inner].format(**names, or_else=request.or_else if request else "")
    with pytest.raises(ValueError, match=re.escape(reason)):
        make[outer](one)


def test_a_wrapper_changes_nothing_inside_of_it_when_it_is_made():
    """Neither in what it takes, nor in what it refuses."""
    make = order_table.WRAPPERS
    for outer, inner in TABLE:
        stack = [make[inner](order_table.plain())]
        stack.append(stack[0].opt)
        before = [dict(vars(opt)) for opt in stack]
        with contextlib.suppress(ValueError):
            make[outer](stack[0])
        for opt, held in zip(stack, before):
            changed = [k for k in {**held, **vars(opt)} if held.get(k) is not vars(opt).get(k)]
            assert not changed, f"{outer} around {inner}: {type(opt).__name__} has other {changed}"


@pytest.mark.parametrize("outer", sorted(order_table.WRAPPERS))
def test_accumulation_of_one_step_is_the_inner_optimizer_inside_and_outside_of_all(outer):
    def operations(*wraps):
        with tf.Graph().as_default():
            opt = order_table.plain()
            for wrap in wraps:
                opt = wrap(opt)
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            x = tf.constant(batches(1)[0]["x"])
            build_by(lambda: opt)(mesh, {"x": x})
            return collections.Counter(type(op).__name__ for op in mesh.graph.operations)

    make = order_table.WRAPPERS[outer]
    alone = operations(make)
    for place in ("local", "synced", None):
        one = functools.partial(
            gs.GradientAccumulationOptimizer, backward_passes_per_step=1, accumulate=place
        )
        for wraps in ((one, make), (make, one)):
            more = operations(*wraps) - alone
            assert set(more) <= {"Assign", "Constant", "AddOperation"}, "a counter at most"


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("AverageOptimizer", "GradientAccumulationOptimizer, local"),
        ("GradientAccumulationOptimizer, local", "AverageOptimizer"),
        ("LossScaleOptimizer", "AverageOptimizer"),
        ("SyncReplicasOptimizer", "AverageOptimizer"),
        ("AverageOptimizer", "ShardedUpdateOptimizer"),
        ("OuterOptimizer", "AverageOptimizer"),
        # On every step, of the outer values, which every second one changes.
        ("AverageOptimizer", "OuterOptimizer"),
    ],
)
@pytest.mark.mostly_slow
def test_averages_move_with_each_update_from_the_new_values(outer, inner, mesh_kind):
    """`average -= (1 - decay) * (average - value)`, in float64, from the variables of each step."""
    steps = 4
    feeds = batches(steps)
    built = harness.built(mesh_kind, SHAPE, LAYOUT, build(outer, inner), feeds[0])
    passes = 2 if "Accumulation" in outer + inner else 1
    expected = START.astype(np.float64)
    for found in built.after_each(feeds)[passes - 1 :: passes]:
        expected -= 0.1 * (expected - found["w"])
        # Each of up to four updates rounds a difference, a product and a sum in float32.
        largest = np.abs(expected).max() + 1e-3
        np.testing.assert_allclose(
            found["w/ExponentialMovingAverage"], expected, rtol=0, atol=12 * 2**-24 * largest
        )
    assert np.abs(expected - START).max() > 1e-3
