"""Wrong arguments of every public function: an error that says which, before anything is built.

A call with one argument replaced ends in a result, or in a TypeError or ValueError that this
package raises; after an error both graphs are as they were before.
"""

import inspect
import traceback
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mtf_gradsync as gs
from mtf_gradsync import compat_v1, estimator, gradients, optimizers, reduce, xla
from mtf_gradsync._common import INT32_MAX
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference
from tests.wrappers import REGISTRY

PACKAGE = str(Path(gs.__file__).parent)
MESH = {"mesh_shape": "rows:2;cols:2", "layout": "batch:rows;hidden:cols"}
PLACED = (*MESH.values(), [""] * 4)


def sgd():
    return mtf.optimize.SgdOptimizer(0.1)


class World:
    """A model with gradients, in graphs of its own, and values that are wrong for most."""

    def __init__(self):
        self.tf_graph, self.graph = tf.Graph(), mtf.Graph()
        with self.tf_graph.as_default():
            self.mesh = mtf.Mesh(self.graph, "mesh")
            shape = [models.BATCH, models.INPUTS]
            inputs = {k: tf.placeholder(tf.float32, shape) for k in "xy"}
            self.loss = models.mlp_loss(self.mesh, inputs)
            self.variables = list(self.graph.trainable_variables)
            self.grads = mtf.gradients([self.loss], [v.value for v in self.variables])
            self.axes = gs.ReplicaAxes(**MESH)
            self.shards = gs.per_shard(self.grads, self.axes)
            self.step = tf.train.get_or_create_global_step()
            self.wrong = self._wrong()

    def _wrong(self):
        scalar = mtf.Shape([])
        other_mesh = mtf.Mesh(mtf.Graph(), "other")
        foreign = mtf.get_variable(other_mesh, "foreign", mtf.Shape([mtf.Dimension("in", 6)]))
        second = mtf.get_variable(mtf.Mesh(self.graph, "second"), "second", scalar, trainable=False)
        whole = mtf.cast(self.loss, tf.int32)
        first = self.grads[0]
        return {
            **{repr(x)[:20]: x for x in (None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 0.5)},
            **{repr(x): x for x in (float("nan"), float("inf"), 1e39, 1j, [], [None], (), {})},
            **{repr(x)[:20]: x for x in ("", "batch", "a b\n", "\udc80", "x" * 5000, b"batch")},
            **{repr(x): x for x in ("rows:4", ":::", "x:-1", "batch:rows;batch:cols", {"batch"})},
            **{repr(x): x for x in ([1, 2], {1: 2}, np.int32(3), np.float32(2.5), np.zeros(3))},
            "object": object(),
            "class": dict,
            "function": lambda *a, **k: None,
            "failing": lambda: 1 / 0,
            "tf scalar": tf.constant(1.0),
            "tf vector": tf.constant([1.0, 2.0]),
            "tf text": tf.constant("a"),
            "tf variable": self.step,
            "dtype": tf.float32,
            "dtype of texts": tf.string,
            "loss": self.loss,
            "whole": whole,
            "gradient": first,
            "gradients": self.grads,
            "of shards": self.shards,
            "variable": self.variables[0],
            "variables": self.variables,
            "of another graph": foreign,
            "variable of another graph": foreign.operation,
            "of another mesh": second,
            "mesh": self.mesh,
            "another mesh": other_mesh,
            "axes": self.axes,
            "optimizer": sgd(),
            "dimension": mtf.Dimension("batch", 2),
            "mixed": [first, 1],
            "of two graphs": [first, foreign],
            "twice": [first, first],
            "pairs": [(first, self.variables[0])],
            "turned pairs": [(self.variables[0], first)],
            "halves": [(1,)],
        }

    def state(self):
        """What is in both graphs."""
        collections = {k: len(self.tf_graph.get_collection(k)) for k in self.tf_graph.collections}
        return (
            list(self.graph.operations),
            list(self.graph.all_variables),
            list(self.graph.trainable_variables),
            dict(self.graph.name_to_variable),
            len(self.tf_graph.get_operations()),
            collections,
        )


# Wrappers with the least that they need.
WRAPPERS = {getattr(gs, name): entry.needs for name, entry in REGISTRY.items()}
# Functions and classes with arguments that are right.
CALLS = {
    gs.AdamWOptimizer: lambda w: {"learning_rate": 0.1},
    gs.MeshOptimizer: lambda w: {"opt": tf.train.GradientDescentOptimizer(0.1)},
    compat_v1.is_v1: lambda w: {"optimizer": sgd()},
    gs.ReplicaAxes: lambda w: MESH,
    reduce.AllReduce: lambda w: {},
    reduce.BestAllReduce: lambda w: {},
    reduce.CollectiveAllReduce: lambda w: {},
    reduce.CompressedAllReduce: lambda w: {},
    reduce.FusedAllReduce: lambda w: {},
    reduce.HierarchicalAllReduce: lambda w: {},
    reduce.LowRankAllReduce: lambda w: {},
    reduce.QuantizedAllReduce: lambda w: {},
    reduce.ReductionToOneDevice: lambda w: {},
    reduce.RingAllReduce: lambda w: {},
    reduce.check_strategy: lambda w: {"reducer": reduce.FusedAllReduce()},
    reduce.placement_mesh_impl: lambda w: dict(zip(("shape", "layout", "devices"), PLACED)),
    gradients.clip_by_global_norm: lambda w: {"grads": w.grads, "clip_norm": 1.0},
    gradients.clip_by_shard_norm: lambda w: {"grads": w.grads, "clip_norm": 1.0, "axes": w.axes},
    gradients.global_norm: lambda w: {"grads": w.grads},
    gradients.not_finite: lambda w: {"grads": w.grads},
    gradients.per_shard: lambda w: {"grads": w.grads, "axes": w.axes},
    gradients.shard_norms: lambda w: {"grads": w.shards, "axes": w.axes},
    gradients.shards_not_finite: lambda w: {"grads": w.shards, "axes": w.axes},
    gradients.sum_shards: lambda w: {"grads": w.shards, "axes": w.axes},
    gs.adafactor_decay_rate_per_update: lambda w: {"backward_passes_per_step": 2},
    gs.get_update_step: lambda w: {"mesh": w.mesh},
    gs.gradient_noise_scale: lambda w: {"opt": sgd(), "batch_size": 16},
    gs.moving_average: lambda w: {"variable": w.variables[0]},
    gs.per_update: lambda w: {"schedule": 0.1, "backward_passes_per_step": 2},
    gs.session_config: lambda w: {},
    gs.skip_large_updates: lambda w: {"max_norm": 1.0},
    gs.skip_not_finite: lambda w: {"grads": w.grads},
    optimizers.scalar_state: lambda w: {"mesh": w.mesh, "name": "state"},
    optimizers.split_by_shard: lambda w: {"values": {"a": np.zeros(2)}},
    estimator.SpecBuilder: lambda w: {"mode": "train", **MESH},
    **{cls: lambda w, kw=kw: {"opt": sgd(), **MESH, **kw} for cls, kw in WRAPPERS.items()},
}
METHODS = {
    "minimize": lambda w: {"loss": w.loss, "global_step": w.step},
    "compute_gradients": lambda w: {"loss": w.loss},
    "apply_gradients": lambda w: {
        "grads_and_vars": list(zip(w.grads, w.variables)), "global_step": w.step
    },
    "apply_grads": lambda w: {"grads": w.grads, "variables": w.variables},
}  # fmt: skip


def parameters(function):
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(function).parameters.values()
    return [p.name for p in found if p.kind in kinds and p.name != "self"]


# Each (class or function, method or "", argument).
ARGUMENTS = [(call, "", name) for call in CALLS for name in parameters(call)]
OF_WRAPPERS = [
    (cls, method, name)
    for cls in WRAPPERS
    for method in METHODS
    for name in parameters(getattr(cls, method))
]
VALUES = list(World().wrong)
_worlds = [World()]


def call(target, method, name, value):
    """Makes a call with one argument replaced by a wrong value, and looks at how it ends."""
    world = _worlds[-1]
    with world.tf_graph.as_default():
        given = CALLS[target](world)
        if method:
            target, given = getattr(target(**given), method), METHODS[method](world)
        given = {**given, name: world.wrong[value]}
        if name == "axes":
            given = {k: v for k, v in given.items() if k not in MESH}
        before = world.state()
        try:
            target(**given)
        except (TypeError, ValueError) as error:
            told, where = error, traceback.extract_tb(error.__traceback__)[-1].filename
        else:
            told, where = None, PACKAGE
        assert where.startswith(PACKAGE), told
        assert told is None or world.state() == before, told
        if world.state() != before:
            _worlds[-1] = World()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([*ARGUMENTS, *OF_WRAPPERS]), st.sampled_from(VALUES))
def test_a_wrong_argument_is_told_before_anything_is_built(argument, value):
    call(*argument, value)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [ARGUMENTS, OF_WRAPPERS], ids=["made", "applied"])
def test_a_thousand_wrong_arguments(arguments):
    @settings(max_examples=500, deadline=None)
    @given(st.sampled_from(arguments), st.sampled_from(VALUES))
    def fuzz(argument, value):
        call(*argument, value)

    fuzz()


COUNTS = [
    (gs.GradientAccumulationOptimizer, "backward_passes_per_step"),
    (gs.GradientAccumulationOptimizer, "max_steps_without_update"),
    (gs.LossScaleOptimizer, "growth_steps"),
    (gs.LossScaleOptimizer, "max_steps_without_update"),
    (gs.OuterOptimizer, "inner_steps"),
    (gs.OuterOptimizer, "fragments"),
    (gs.OuterOptimizer, "max_steps_without_update"),
    (gs.SyncReplicasOptimizer, "replicas_to_aggregate"),
    (gs.SyncReplicasOptimizer, "max_steps_without_update"),
    (gs.per_update, "backward_passes_per_step"),
    (gs.adafactor_decay_rate_per_update, "backward_passes_per_step"),
    (gs.session_config, "num_cpu_devices"),
    (reduce.AllReduce, "num_packs"),
    (reduce.AllReduce, "agg_small_grads_max_group"),
    (reduce.CollectiveAllReduce, "merge_scope"),
    (reduce.LowRankAllReduce, "rank"),
    (reduce.LowRankAllReduce, "start_step"),
    (reduce.QuantizedAllReduce, "block_size"),
    (xla.devices_for, "num_cores"),
]


@pytest.mark.parametrize(("target", "name"), COUNTS, ids=lambda x: getattr(x, "__name__", x))
def test_a_count_that_no_int32_holds_is_named(target, name):
    world = _worlds[-1]
    with world.tf_graph.as_default():
        given = CALLS[target](world) if target in CALLS else {}
        before = world.state()
        for value in (2**31, 2**32, np.int64(2**40), 2**63):
            with pytest.raises(ValueError, match=rf"{name} must be .* {INT32_MAX}.*got .*{value}"):
                target(**{**given, name: value})
        assert world.state() == before
        if target is not xla.devices_for:
            target(**{**given, "inner_steps": INT32_MAX, name: INT32_MAX} if name == "fragments"
                   else {**given, name: INT32_MAX})  # fmt: skip


def many(step):
    return tf.constant(2**32 + 1, tf.int64) + tf.cast(step, tf.int64)


NEVER = {
    "K": lambda opt: gs.GradientAccumulationOptimizer(opt, INT32_MAX, **MESH),
    "K of a function": lambda opt: gs.GradientAccumulationOptimizer(opt, many, **MESH),
    "replicas": lambda opt: gs.SyncReplicasOptimizer(opt, INT32_MAX, **MESH),
}


@pytest.mark.parametrize("kind", ["placement", pytest.param("xla", marks=pytest.mark.xla)])
@pytest.mark.parametrize("what", NEVER)
@pytest.mark.slow
def test_what_never_comes_does_not(kind, what):
    """Numbers at the end of int32, and int64 numbers beyond it, do not wrap around in the step."""
    build = models.train(lambda: NEVER[what](sgd()))
    result = harness.run(kind, *MESH.values(), build, models.mlp_batches(2))
    reference.assert_equal(result.variables, models.mlp_values())


@pytest.mark.parametrize("kind", ["placement", pytest.param("xla", marks=pytest.mark.xla)])
@pytest.mark.slow
def test_a_scale_that_never_grows(kind):
    def wrapped():
        return gs.LossScaleOptimizer(sgd(), growth_steps=INT32_MAX, **MESH)

    result = harness.run(kind, *MESH.values(), models.train(wrapped), models.mlp_batches(3))
    assert result.variables["LossScaleOptimizer/scale"] == 2.0**15
    assert result.variables["LossScaleOptimizer/good_steps"] == 3


def test_minimize_without_a_global_step_builds_nothing():
    world = World()
    with world.tf_graph.as_default():
        opt = gs.SyncReplicasOptimizer(sgd(), 2, axes=world.axes)
        before = world.state()
        with pytest.raises(ValueError, match="A global step is required"):
            opt.minimize(world.loss)
        assert world.state() == before


def test_none_counts_as_zeros_among_gradients():
    world = World()
    with world.tf_graph.as_default():
        for function, axes in (
            (gradients.global_norm, ()),
            (gradients.shard_norms, [world.axes]),
        ):
            grads = world.shards if axes else world.grads
            norms = [function(some, *axes) for some in (grads, [None, *grads])]
            inputs = [norm.operation.inputs[0].operation.inputs for norm in norms]
            assert inputs[0] == inputs[1]
