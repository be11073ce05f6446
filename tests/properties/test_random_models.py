"""Random models under random wrappers on random meshes train as numpy float64 does.

Soaks: HYPOTHESIS_EXAMPLES=500 python -m pytest tests/properties/test_random_models.py
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

import mtf_gradsync as gs
from tests import harness, models, reference
from tests.optimizers.sync_replicas.sync_replicas_reference import SyncReplicas
from tests.properties.models import random_models, small_models, training, uses
from tests.properties.sync_replicas_schedules import parts

SHARD_SIZES = {"8": (8,), "4": (4,), "4x2": (4,), "2x2": (2,), "2x2x2": (2, 2)}
EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", 0))


def profile(examples):
    """Few examples, the same in each run; a soak has many, and new ones."""
    return settings(derandomize=not EXAMPLES, max_examples=EXAMPLES or examples)


class Setup(NamedTuple):
    """What trains a model.

    Attributes:
      wrapper: "cross", "accumulate" or "sync".
      inner: name in `models.OPTIMIZERS`.
      clip: norm to clip the sum by, or None.
      place: of accumulators.
      count: microbatch steps or contributions for an update.
      average: whether accumulated gradients are averaged.
      skips: whether accumulation leaves out what is not finite.
      steps: number of steps.
      out: (step, replica) that a mask leaves out.
      broken: (step, replica) whose data hold a NaN.
      seed: of the batches.
    """

    wrapper: str
    inner: str = "sgd"
    clip: float | None = None
    place: str = "local"
    count: int = 1
    average: bool = False
    skips: bool = False
    steps: int = 2
    out: tuple[tuple[int, int], ...] = ()
    broken: tuple[tuple[int, int], ...] = ()
    seed: int = 1

    def feeds(self, shard_sizes):
        feeds = small_models.batches(self.steps, self.seed)
        number = int(np.prod(shard_sizes))
        rows = parts(np.arange(models.BATCH), shard_sizes)
        for feed in feeds:
            feed["contributes"] = np.ones(number, bool)
        for step, replica in self.out:
            feeds[step]["contributes"][replica] = False
        for step, replica in self.broken:
            feeds[step]["y"][rows[replica][0], 0] = np.nan
        return feeds

    def optimizer(self, axes, contributes):
        inner = models.OPTIMIZERS[self.inner]()
        if self.clip is not None:
            inner = gs.ClipByGlobalNormOptimizer(inner, self.clip)
        if self.wrapper == "cross":
            return gs.CrossShardOptimizer(inner)
        if self.wrapper == "accumulate":
            return gs.GradientAccumulationOptimizer(
                inner,
                self.count,
                average_aggregated_gradients=self.average,
                should_skip_update_fn=gs.skip_not_finite if self.skips else None,
                accumulate=self.place,
                axes=axes,
            )
        return gs.SyncReplicasOptimizer(inner, self.count, axes=axes, contributes=contributes)

    def in_numpy(self, model, values, shard_sizes):
        """Values after the steps; how large numbers became; for replicas, what they counted."""
        update = reference.OPTIMIZERS[self.inner]()
        if self.clip is not None:
            update = reference.Clipped(update, self.clip)
        values = {k: np.asarray(v, np.float64) for k, v in values.items()}
        number, size = int(np.prod(shard_sizes)), 1.0
        replicas = SyncReplicas(update, number, self.count, values)
        if self.wrapper == "accumulate":
            skip = (lambda grads: not reference.is_finite(grads)) if self.skips else None
            update = reference.Accumulation(update, self.count, self.average, skip)
        for feed in self.feeds(shard_sizes):
            if self.wrapper == "sync":
                grads = training.shard_gradients(model, values, feed, shard_sizes)
                replicas.step(grads, feed["contributes"])
                values = replicas.values
            else:
                with np.errstate(invalid="ignore"):
                    grads = [training.numpy_gradients(model, values, feed)]
                values = update(values, grads[0])
            for one in [values, *grads]:
                sizes = (np.abs(x)[np.isfinite(x)] for x in one.values())
                size = max(size, *(np.max(x, initial=0) for x in sizes))
        return values, size, replicas


@st.composite
def setups(draw, number):
    """Wrappers for a mesh of so many shards, with what may go wrong under each."""
    wrapper = draw(st.sampled_from(["cross", "accumulate", "accumulate", "sync", "sync", "sync"]))
    setup = Setup(
        wrapper,
        draw(st.sampled_from(["sgd", "sgd", "momentum"])),
        draw(st.sampled_from([None, None, 0.1])),
        steps=draw(st.integers(2, 3)),
        seed=draw(st.integers(1, 50)),
    )
    at = st.tuples(st.integers(0, setup.steps - 1), st.integers(0, number - 1))
    some = st.lists(at, max_size=3, unique=True).map(lambda x: tuple(sorted(x)))
    if wrapper == "accumulate":
        skips = draw(st.booleans())
        return setup._replace(
            place=draw(st.sampled_from(["local", "local", "synced"])),
            count=draw(st.integers(1, 3)),
            average=draw(st.booleans()),
            skips=skips,
            broken=draw(some)[:1] if skips else (),
        )
    if wrapper == "sync":
        count = draw(st.sampled_from([number - 1, number - 1, number, number + 1]))
        return setup._replace(count=count, out=draw(some), broken=draw(some))
    return setup


def tolerance(model, setup, shard_sizes, exact):
    """How far rounding takes the mesh from numpy: as far as rounding of the start takes numpy."""
    eps = 16 * model.eps if model.eps == small_models.FLOAT32 else 2 * model.eps
    far = {k: 0.0 for k in exact}
    for seed in (0, 1):
        signs = np.random.RandomState(seed)
        moved = {
            k: v * (1 + eps * signs.choice([-1, 1], np.shape(v))) for k, v in model.values().items()
        }
        values, size, _ = setup.in_numpy(model, moved, shard_sizes)
        for k, v in values.items():
            far[k] = max(far[k], np.max(np.abs(v - exact[k])))
    assume(np.isfinite(size) and size < 50)
    moved = max(np.max(np.abs(v - model.values()[k])) for k, v in exact.items())
    # The mesh's own arithmetic: in variables, and in what is added to them.
    own = 16 * (small_models.FLOAT32 * (1 + 0.1 * size) + model.eps * moved)
    return {k: 4 * distance + own for k, distance in far.items()}


def check(kind, mesh, plan, setup):
    mesh_shape, layout, batch_dims = harness.MESHES[mesh]
    axes = gs.ReplicaAxes(mesh_shape, layout, batch_dims)
    model, shard_sizes = plan.model(), SHARD_SIZES[mesh]
    expected, _, replicas = setup.in_numpy(model, model.values(), shard_sizes)
    close = tolerance(model, setup, shard_sizes, expected)

    def apply(grads, variables, inputs):
        return setup.optimizer(axes, inputs["contributes"]).apply_grads(grads, variables)

    build = training.step(model, batch_dims, apply)
    result = harness.run(kind, mesh_shape, layout, build, setup.feeds(shard_sizes))
    for name, value in expected.items():
        np.testing.assert_allclose(
            result.variables[name], value, rtol=0, atol=close[name], err_msg=name
        )
    if setup.wrapper == "sync":
        made = result.variables["sync_replicas/made"].reshape(-1)
        np.testing.assert_array_equal(made, replicas.made)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["placement", "simd", "xla"])
def test_training_is_that_of_numpy(kind):
    @profile(3)
    @given(st.data())
    def agrees(data):
        # On a placement mesh every processor has operations of its own, elsewhere variables.
        is_large = EXAMPLES and kind != "placement"
        two, one = ("4x2", "8") if is_large else ("2x2", "4")
        mesh = data.draw(st.sampled_from([two, two, "2x2x2", one]), "mesh")
        # Microbatches need a part of each shard's batch.
        plan = data.draw(random_models.plans(with_microbatches=mesh == two), "plan")
        setup = data.draw(setups(int(np.prod(SHARD_SIZES[mesh]))), "setup")
        event(setup.wrapper)
        check(kind, mesh, plan, setup)

    agrees()


# What a step sends.


def sent(model, mesh, make_optimizer):
    """The collectives of a SIMD step."""
    mesh_shape, layout, batch_dims = harness.MESHES[mesh]
    (feed,) = small_models.batches(1)

    def build(mesh, inputs):
        grads, variables = training.gradients_on(model, mesh, inputs, batch_dims)
        return make_optimizer().apply_grads(grads, variables), {}

    return harness.built("simd", mesh_shape, layout, build, feed).collectives().update_step


def check_sent(model, mesh):
    bare = sent(model, mesh, models.OPTIMIZERS["sgd"])
    wrapped = sent(model, mesh, lambda: gs.CrossShardOptimizer(models.OPTIMIZERS["sgd"]()))
    assert wrapped.runs <= bare.runs
    assert wrapped.bytes_per_core <= bare.bytes_per_core


# Linear operations that make more of what they get, or widen it; sums of sums over other axes.
# Bare Mesh-TF cannot lower GenericGradOperation on a pending gradient (softplus, sin).
GROWING = [
    "cast",
    "cast there and back",
    "cast to float64",
    "sum over IN",
    "sum over a split dimension",
    "broadcast over the batch",
    "positions",
    "concat",
    "stack",
    "product of two",
    "product of three",
    "normalized",
    "mean",
    "shared",
    "shared with a cast",
    "pending over two sets of axes",
    "pending over two sets of axes, scalar",
    "tied embedding",
    "layer norm",
    "bfloat16 activations",
    "microbatches",
    "regularizer",
    "split by renaming",
    "whole by renaming",
]


@pytest.mark.parametrize("use", GROWING)
def test_a_wrapped_step_sends_no_more_than_a_bare_one(use):
    check_sent(uses.ALL[use], "2x2")


@profile(4)
@given(random_models.plans(), st.sampled_from(["4x2", "2x2x2", "8"]))
@pytest.mark.slow
def test_a_wrapped_step_of_a_random_model_sends_no_more(plan, mesh):
    assume(all(name != "softplus" for name, *_ in plan.nodes))
    if mesh != "4x2":
        plan = plan._replace(microbatches=1)
    check_sent(plan.model(), mesh)
