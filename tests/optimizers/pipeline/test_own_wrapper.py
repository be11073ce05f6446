"""The wrapper and the strategy of the guide do what it says, on every runtime."""

import re

import numpy as np
import pytest

import mtf_gradsync as gs
from benchmarks import way
from mtf_gradsync import optimizers, xla
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.optimizers import Stage
from mtf_gradsync.optimizers.pipeline import builder, forms
from tests import documents, harness, models, reference
from tests.optimizers.pipeline import shard_losses
from tests.reduce import rounded

SHAPE, LAYOUT, BATCH_DIMS = harness.MESHES["2x2"]
KINDS = ["placement", "simd"] + ([] if xla.why_no_xla() else ["xla"])


@pytest.fixture(scope="module")
def names():
    return documents.run("docs/guides/own_wrapper.md")


def feeds():
    batches = models.mlp_batches(4)
    batches[2]["y"] = batches[2]["y"] * 1000  # the spike
    return batches


def train(make):
    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs, BATCH_DIMS)
        return make().minimize(loss), {"loss": loss}

    return build


def sgd():
    return mtf.optimize.SgdOptimizer(0.1)


@pytest.fixture(scope="module")
def without_the_spike():
    calm = feeds()[:2] + feeds()[3:]
    make = train(lambda: gs.CrossShardOptimizer(sgd()))
    return harness.run("placement", *harness.ONE, make, calm).variables


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_a_spike_is_skipped_and_counted(kind, names, without_the_spike):
    def make():
        return names["SkipSpikesOptimizer"](gs.ClipByGlobalNormOptimizer(sgd(), 1e9))

    found = harness.run(kind, SHAPE, LAYOUT, train(make), feeds()).variables
    assert found["SkipSpikesOptimizer/skipped"] == 1
    # Three steps, whose sums over 4 shards and 16 examples round each in float32.
    reference.assert_close(found, without_the_spike, atol=200 * 2.0**-24)


def test_gradients_that_are_not_finite_are_skipped_and_leave_no_trace(mesh_kind, names):
    """On the first step, which has no norm before it, and on a later one."""
    nan, infinite, calm, spike = feeds()[0], feeds()[1], feeds()[3], feeds()[2]
    nan["x"][0], infinite["x"][-1] = np.nan, np.inf
    steps = [nan, infinite, calm, nan, infinite, spike, calm]

    def make():
        return names["SkipSpikesOptimizer"](gs.CrossShardOptimizer(sgd()))

    found = harness.run(mesh_kind, SHAPE, LAYOUT, train(make), steps).variables
    values = {k: np.asarray(v, np.float64) for k, v in models.mlp_values().items()}
    norms = []
    for _ in range(2):
        grads = reference.mlp_grads(values, *(calm[k].astype(np.float64) for k in ("x", "y")))
        norms.append(reference.norm(grads))
        values = reference.Sgd()(values, grads)
    assert norms[1] < 3 * norms[0]
    assert found["SkipSpikesOptimizer/skipped"] == 5
    # Sums over 4 shards and 16 examples round each in float32.
    expected = {**values, "SkipSpikesOptimizer/norm": norms[0] + 0.1 * (norms[1] - norms[0])}
    reference.assert_close(found, expected, 2.0**-14, 200 * 2.0**-24)


@pytest.mark.slow
def test_it_decides_once_an_update_inside_accumulation(names):
    def make():
        inner = names["SkipSpikesOptimizer"](sgd())
        return gs.GradientAccumulationOptimizer(inner, 2, mesh_shape=SHAPE, layout=LAYOUT)

    found = harness.run("simd", SHAPE, LAYOUT, train(make), feeds()).variables
    first = harness.run("simd", SHAPE, LAYOUT, train(make), feeds()[:2]).variables
    assert found["SkipSpikesOptimizer/skipped"] == 1
    assert all(np.array_equal(found[name], first[name]) for name in models.mlp_values())


@pytest.mark.parametrize("others", [(), ("CrossShardOptimizer",), (shard_losses.LOCAL,)])
@pytest.mark.mostly_slow
def test_losses_of_shards_are_averaged_around_it_and_inside_of_it(names, others, monkeypatch):
    monkeypatch.setitem(shard_losses.WRAPPERS, "own", names["SkipSpikesOptimizer"])
    is_outside = shard_losses.LOCAL not in others
    stack = ["own", *others] if is_outside else [*others, "own"]
    shard_losses.check("simd", stack)


def test_its_order_and_arguments_are_checked(names):
    opt = names["SkipSpikesOptimizer"]
    accumulation = gs.GradientAccumulationOptimizer(sgd(), 2, mesh_shape=SHAPE, layout=LAYOUT)
    with pytest.raises(ValueError, match="SkipSpikesOptimizer around GradientAccumulation"):
        opt(accumulation)
    with pytest.raises(ValueError, match=r"factor must be greater than 1, got 0\.5"):
        opt(sgd(), factor=0.5)
    assert opt(learning_rate=0.5, opt=mtf.optimize.SgdOptimizer).opt


def test_the_page_has_all_names_that_the_example_uses_and_only_some_that_are_there(names):
    promised = way.protocol()
    of = {
        "Stage": optimizers.Stage,
        "gradients": forms.GradientSet,
        "step": builder.StepBuilder,
        "Wrapper": optimizers.Wrapper,
    }
    assert promised.keys() == of.keys()
    for kind, some in promised.items():
        known = {*dir(of[kind]), *getattr(of[kind], "__annotations__", {})}
        assert set(some) <= known, f"{kind} has no {set(some) - known}"
    assert sum(map(len, promised.values())) <= way.MOST_NAMES
    page = (documents.ROOT / "docs/guides/own_wrapper.md").read_text(encoding="utf-8")
    example = page.partition("```python\n")[2].partition("```")[0]
    assert set(re.findall(r"\bstep\.(\w+)", example)) <= set(promised["step"])
    assert set(re.findall(r"\bgradients\.(\w+)(?! import)", example)) <= {
        *promised["gradients"],
        "global_norm",
    }
    stage, wrapper = names["SkipSpikes"], names["SkipSpikesOptimizer"]
    set_by_it = {name for name in vars(stage) if not name.startswith("__") and hasattr(Stage, name)}
    assert set_by_it <= set(promised["Stage"])
    assert {"_wrap", "_check_order", "stages"} <= set(promised["Wrapper"])
    assert sum(bool(line.strip()) for line in example.splitlines()) < 60
    opt = gs.GradientAccumulationOptimizer(
        wrapper(gs.AdamWOptimizer(0.1)), 8, mesh_shape="batch:4", layout="batch:batch"
    )
    shown = page.partition("```text\n")[2].partition("```")[0].splitlines()
    assert [row.split() for row in shown] == [
        row.split() for row in str(gs.describe(opt)).splitlines()
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_the_strategy_notes_what_is_reduced(kind, names, without_the_spike):
    del without_the_spike
    strategy = names["NotedAllReduce"]()
    make = train(lambda: gs.CrossShardOptimizer(sgd(), reducer=strategy))
    plain = train(lambda: gs.CrossShardOptimizer(sgd()))
    found = harness.run(kind, SHAPE, LAYOUT, make, feeds()).variables
    expected = harness.run(kind, SHAPE, LAYOUT, plain, feeds()).variables
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    # All three are reduced in float32: w1 and b1 are split over the model axis, the scalar is not.
    gradients = models.INPUTS * models.HIDDEN // 2 + models.HIDDEN // 2 + 1
    assert sum(size for _, size, _ in strategy.noted) == 4 * gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_the_strategy_with_state_sends_rounded_gradients_and_keeps_the_rest(kind, names):
    def make():
        strategy = names["RoundedAllReduce"]()
        opt = mtf.optimize.SgdOptimizer(rounded.RATE)
        return gs.CrossShardOptimizer(opt, reducer=strategy, mesh_shape=SHAPE, layout=LAYOUT)

    def build(mesh, inputs):
        return make().minimize(rounded.loss(mesh, inputs)), {}

    batches, reference = rounded.batches(5), rounded.Reference(2)
    for batch in batches:
        reference.apply(reference.send(batch))
    reference.check(harness.run(kind, SHAPE, LAYOUT, build, batches).variables)
