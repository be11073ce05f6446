"""Random stacks of three wrappers are refused as the rules say, or train as numpy float64 does.

Soaks: HYPOTHESIS_EXAMPLES=60 python -m pytest tests/optimizers/pipeline/test_random_stacks.py
"""

from __future__ import annotations

import os
import re
from typing import Any, Sequence

import numpy as np
import pytest
from hypothesis import given, note, reject, settings
from hypothesis import strategies as st

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.pipeline.order import needs_shards, why_not
from mtf_gradsync.optimizers.pipeline.stack import stages_of
from tests import harness, models
from tests.optimizers.pipeline import stack_reference
from tests.optimizers.pipeline.stack_reference import BATCH, HIDDEN, INPUTS, Spec

# Mesh and layout; the number of shards is 2 on both.
MESHES = {"2": ("all:2", "batch:all"), "2x2": harness.MESHES["2x2"][:2]}
SHARDS = 2
FLOAT32 = 2.0**-24
EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", 0))


def profile(examples):
    """Few examples, the same in each run; a soak has many, and new ones."""
    return settings(derandomize=not EXAMPLES, max_examples=EXAMPLES or examples)


def of(kind, **arguments):
    return st.fixed_dictionaries(arguments).map(lambda drawn: Spec(kind, drawn))


DECAYS = st.sampled_from([0.5, 0.9])
SPECS = st.one_of(
    of("CrossShardOptimizer"),
    of("ClipByGlobalNormOptimizer", clip_norm=st.sampled_from([0.05, 10.0])),
    of("ShardedUpdateOptimizer"),
    of("AverageOptimizer", decay=DECAYS),
    of(
        "LossScaleOptimizer",
        loss_scale=st.sampled_from(["dynamic", 256.0]),
        initial_scale=st.just(1024.0),
        growth_steps=st.sampled_from([1, 2, 9]),
    ),
    of(
        "GradientAccumulationOptimizer",
        accumulate=st.sampled_from(["local", "synced", "sharded"]),
        backward_passes_per_step=st.integers(1, 3),
        average_aggregated_gradients=st.booleans(),
        skips=st.booleans(),
    ),
    of(
        "SyncReplicasOptimizer",
        replicas_to_aggregate=st.integers(1, SHARDS + 1),
        accept_summed=st.booleans(),
        decay=st.one_of(st.none(), DECAYS),
    ),
)


def make(spec, inside, name="wrapper", mesh="2", variables=(), contributes=None):
    """The wrapper of the package."""
    mesh_shape, layout = MESHES[mesh]
    common = {"name": name, "axes": gs.ReplicaAxes(mesh_shape, layout)}
    arguments = dict(spec.arguments)
    if spec.kind == "GradientAccumulationOptimizer":
        skips = arguments.pop("skips")
        arguments["should_skip_update_fn"] = gs.skip_not_finite if skips else None
    elif spec.kind == "SyncReplicasOptimizer":
        decay = arguments.pop("decay")
        if decay is not None:
            arguments.update(variable_averages=decay, variables_to_average=variables)
        arguments["contributes"] = contributes
    elif spec.kind == "ShardedUpdateOptimizer":
        arguments["min_size"] = 1
    return getattr(gs, spec.kind)(inside, **arguments, **common)


def reason(stack, variables):
    """Why a stack is refused when it is made from the inside out, in full; None where it is not."""
    alone = [
        stages_of(make(spec, models.OPTIMIZERS["sgd"](), variables=variables)) for spec in stack
    ]
    for outer in reversed(range(len(stack))):
        for inner in range(outer + 1, len(stack)):
            why = why_not(alone[outer], alone[inner])
            if why is not None:
                names = {"outer": stack[outer].kind, "inner": stack[inner].kind}
                request = needs_shards(alone[inner])
                return why.format(**names, or_else=request.or_else if request else "")
    return None


def made(stack, inner, mesh="2", variables=(), contributes=None):
    """The stack of the package."""
    opt = models.OPTIMIZERS[inner]()
    for number in reversed(range(len(stack))):
        opt = make(stack[number], opt, f"wrapper_{number}", mesh, variables, contributes)
    return opt


def variable_of_another_graph():
    return mtf.get_variable(mtf.Mesh(mtf.Graph(), "mesh"), "v", mtf.Shape([]))


@profile(30)
@given(st.lists(SPECS, min_size=3, max_size=3))
@pytest.mark.slow
def test_a_stack_is_refused_just_where_a_rule_says_so(stack):
    with tf.Graph().as_default():
        variables = [variable_of_another_graph().operation]
        why = reason(stack, variables)
        if why is None:
            made(stack, "sgd", variables=variables)
        else:
            with pytest.raises(ValueError, match=re.escape(why)):
                made(stack, "sgd", variables=variables)


# Training.


@st.composite
def stacks(draw):
    """A stack of up to three wrappers that is not refused: the first that fit of some more."""
    with tf.Graph().as_default():
        variables = [variable_of_another_graph().operation]
        stack: list[Spec] = []
        for spec in draw(st.lists(SPECS, min_size=6, max_size=6, unique_by=lambda x: x.kind)):
            if len(stack) < 3 and reason([spec, *stack], variables) is None:
                stack.insert(0, spec)
    return stack


@st.composite
def feeds(draw):
    """Batches of four to six steps; some have a NaN, or a replica that a mask skips."""
    rng = np.random.RandomState(draw(st.integers(1, 99)))
    batches: list[dict[str, np.ndarray]] = []
    for _ in range(draw(st.integers(4, 6))):
        feed = {
            "x": rng.randn(BATCH, INPUTS).astype("f"),
            "y": rng.randn(BATCH, HIDDEN).astype("f"),
        }
        feed["contributes"] = np.ones(SHARDS, bool)
        event = draw(st.sampled_from(["", "", "", "nan", "mask"]))
        shard = draw(st.integers(0, SHARDS - 1))
        if event == "nan":
            feed["y"][shard * BATCH // SHARDS, 0] = np.nan
        elif event == "mask":
            feed["contributes"][shard] = False
        batches.append(feed)
    return batches


def program(stack, inner, mesh):
    def build(of, inputs):
        values = stack_reference.start()
        batch, features, hidden = (
            mtf.Dimension(name, size)
            for name, size in (("batch", BATCH), ("in", INPUTS), ("hidden", HIDDEN))
        )
        w, b = (
            models.variable(of, name, dims, values[name])
            for name, dims in (("w", [features, hidden]), ("b", [hidden]))
        )
        x = mtf.import_tf_tensor(of, inputs["x"], mtf.Shape([batch, features]))
        y = mtf.import_tf_tensor(of, inputs["y"], mtf.Shape([batch, hidden]))
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, w], [batch, hidden]) + b - y))
        variables = of.graph.trainable_variables
        opt = made(stack, inner, mesh, list(variables), inputs["contributes"])
        if not stack:
            opt = gs.CrossShardOptimizer(opt)
        return opt.minimize(loss, tf.train.get_or_create_global_step()), {"loss": loss}

    return build


def tolerances(expected, train):
    """How far rounding takes a run from numpy: as far as rounding of the start takes numpy."""
    far = dict.fromkeys([*expected.values, *expected.state], 0.0)
    largest = 1.0
    for seed in (0, 1, 2):
        signs = np.random.RandomState(seed)
        begin = {
            name: value * (1 + 16 * FLOAT32 * signs.choice([-1, 1], value.shape))
            for name, value in stack_reference.start().items()
        }
        moved = train(begin)
        for found, exact in ((moved.values, expected.values), (moved.state, expected.state)):
            for name, value in found.items():
                distance = np.abs(np.asarray(value) - exact[name])
                far[name] = max(far[name], np.max(distance[np.isfinite(distance)], initial=0))
                numbers = np.abs(np.asarray(exact[name]))
                if "wrapper" not in name:
                    largest = max(largest, np.max(numbers[np.isfinite(numbers)], initial=0))
    # Values that grow beyond all bounds are no test of a stack.
    if largest > 50:
        reject()
    # Some thirty operations a step of at most six, on numbers of this size.
    return {name: 4 * distance + 200 * FLOAT32 * largest for name, distance in far.items()}


def check(kind: str, mesh: str, stack: Sequence[Spec], inner: str, feeds: Any) -> None:
    names = [f"wrapper_{number}" for number in range(len(stack))]

    def train(begin):
        return stack_reference.train(stack, names, inner, feeds, SHARDS, begin)

    expected = train(stack_reference.start())
    close = tolerances(expected, train)
    result = harness.run(kind, *MESHES[mesh], program(stack, inner, mesh), feeds)
    for name, value in {**expected.values, **expected.state}.items():
        found = np.reshape(result.variables[name], np.shape(value))
        np.testing.assert_allclose(found, value, rtol=0, atol=close[name], err_msg=name)
    assert result.variables["global_step"] == expected.global_step


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_a_stack_trains_as_numpy_does(kind):
    @profile(3)
    @given(
        stacks(),
        st.sampled_from(["sgd", "momentum", "adam"]),
        feeds(),
        st.sampled_from(sorted(MESHES)),
    )
    def trains(stack, inner, feeds, mesh):
        note([[spec.kind, spec.arguments] for spec in stack])
        check(kind, mesh, stack, inner, feeds)

    trains()


@pytest.mark.parametrize(
    "adds_up",
    [
        Spec(
            "GradientAccumulationOptimizer",
            {
                "accumulate": "synced",
                "backward_passes_per_step": 2,
                "average_aggregated_gradients": True,
                "skips": False,
            },
        ),
        Spec(
            "SyncReplicasOptimizer",
            {"replicas_to_aggregate": 3, "accept_summed": True, "decay": None},
        ),
    ],
    ids=lambda spec: spec.kind,
)
@pytest.mark.mostly_slow
def test_reduced_gradients_are_added_up_whole_around_sharded_updates(adds_up, mesh_kind):
    clip = Spec("ClipByGlobalNormOptimizer", {"clip_norm": 0.05})
    rng = np.random.RandomState(3)
    feeds = [
        {
            "x": rng.randn(BATCH, INPUTS).astype("f"),
            "y": rng.randn(BATCH, HIDDEN).astype("f"),
            "contributes": np.ones(SHARDS, bool),
        }
        for _ in range(4)
    ]
    check(mesh_kind, "2", [clip, adds_up, Spec("ShardedUpdateOptimizer", {})], "momentum", feeds)
