"""Gradients applied one pair at a time are one step: reduced together, counted once."""

import gc
import logging
import weakref

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import reduce
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.step.writes import advance_step
from tests import harness, models, reference, wrappers

SHAPE, LAYOUT, _ = harness.MESHES["2"]
AXES = {"mesh_shape": SHAPE, "layout": LAYOUT}
STEPS, RATE, NORM = 4, 0.1, 0.3
# As for CrossShardOptimizer's trajectories.
TOLERANCE = STEPS * 16 * np.finfo(np.float32).eps


class Counted(reduce.Strategy):
    """Notes how many tensors each call has."""

    def __init__(self):
        self.inner, self.calls = gs.FusedAllReduce(), []

    def all_reduce(self, mesh_impl, values, groups):
        self.calls.append(len(values))
        return self.inner.all_reduce(mesh_impl, values, groups)


class PairByPair(mtf.optimize.Optimizer):
    """An optimizer of others that passes pairs on, with Mesh-TF's own apply_grads."""

    def __init__(self, inner):
        self.inner = self.opt = inner

    def apply_grad(self, grad, var):
        return self.inner.apply_grad(grad, var)


def sgd():
    return mtf.optimize.SgdOptimizer(RATE)


# One island reduces nothing. In "inside", the wrapper is in an optimizer that passes pairs on.
NAMES = [*(name for name in wrappers.KINDS if name != "one island"), "inside"]


def wrapped(name, strategy=None):
    """Makes a wrapper whose update is of the sum of its steps, or of replicas the mean."""
    if name == "inside":
        return PairByPair(gs.CrossShardOptimizer(sgd(), reducer=strategy))
    return wrappers.wrap(
        name,
        PairByPair(gs.CrossShardOptimizer(sgd())) if name == "synced" else sgd(),
        AXES,
        reducer=strategy,
        clip_norm=NORM,
        average_aggregated_gradients=False,
        replicas_to_aggregate=4,
        inner_steps=1,
        outer_learning_rate=1.0,
        outer_momentum=0.0,
    )


def apply_pairs(make):
    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs)
        grads, variables = models.gradients(loss)
        optimizer = make()
        with tf.variable_scope("state"):
            operations = [
                op for pair in zip(grads, variables) for op in optimizer.apply_grad(*pair)
            ]
        count = tf.train.get_or_create_global_step()
        operations.append(advance_step(mesh, count, operations, "count"))
        return operations, {"loss": loss}

    return build


def expected(name):
    passes = 1 if name == "inside" else wrappers.passes(name)
    every = 2 if name == "replicas" else passes
    update = reference.Sgd(RATE)
    update = reference.Clipped(update, NORM) if name == "clip" else update
    return reference.train(
        reference.Accumulation(update, every, name == "replicas"), models.mlp_batches(STEPS)
    )


# What each says of pairs is the same on a placement mesh: one of each number of steps is built.
ON_PLACEMENT = ["clip", "local", "replicas"]


@pytest.mark.parametrize(
    ("kind", "name"),
    harness.on_both([(name,) for name in NAMES], [(name,) for name in ON_PLACEMENT]),
)
@pytest.mark.mostly_slow
def test_pairs_are_reduced_together_and_train_as_numpy_does(kind, name):
    counted = Counted()
    feeds = models.mlp_batches(STEPS)
    build = apply_pairs(lambda: wrapped(name, counted))
    made = harness.built(kind, SHAPE, LAYOUT, build, feeds[0])
    # All gradients; of sums and updates in parts, the one that is not split.
    whole = 1 if name in ("sharded", "sharded sums") else 3
    assert counted.calls.count(whole) == 1
    assert counted.calls.count(1) <= 3  # squares, flags and counts of all
    assert kind == "simd" or not made.races()
    found = made.run(feeds).variables
    reference.assert_close(found, expected(name), TOLERANCE)
    assert found["global_step"] == STEPS


def program(apply):
    loss = models.mlp_loss(mtf.Mesh(mtf.Graph(), "mesh"), inputs())
    variables = list(loss.graph.trainable_variables)
    return loss, apply(mtf.gradients([loss], [v.value for v in variables]), variables)


def inputs():
    return {k: tf.constant(v) for k, v in models.mlp_batches(1)[0].items()}


@pytest.mark.parametrize("name", ["local", "replicas"])
@pytest.mark.mostly_slow
def test_state_has_the_names_of_one_call(name):
    def names(apply):
        with tf.Graph().as_default():
            loss, _ = program(apply)
            mtf.Lowering(loss.graph, {loss.mesh: harness.placement(SHAPE, LAYOUT)})
            return [v.op.name for v in tf.global_variables()]

    def one_by_one(grads, variables):
        optimizer = wrapped(name)
        return [op for pair in zip(grads, variables) for op in optimizer.apply_grad(*pair)]

    together = names(lambda g, v: wrapped(name).apply_grads(g, v))
    assert names(one_by_one) == together


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if "apply_grad:" in r.getMessage()]


def test_what_is_asked_for_builds_the_step(caplog):
    optimizer = gs.GradientAccumulationOptimizer(models.OPTIMIZERS["adam"](), 2, **AXES)
    state = {}

    def apply(grads, variables):
        operations = optimizer.apply_grad(grads[0], variables[0])
        operations += optimizer.apply_grad(grads[1], variables[1])
        state["counter"] = optimizer.update_step
        state["slot"] = optimizer.get_slot(variables[1], "adam_m")
        state["none"] = optimizer.get_slot(variables[2], "adam_m")
        return operations

    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        program(apply)
    assert state["counter"].name == "GradientAccumulationOptimizer/update_step"
    assert state["slot"].name == "b1/adam_m"
    assert state["none"] is None
    assert not warnings_of(caplog)


@pytest.mark.parametrize("why", ["built", "twice", "scope", "arguments", "apply_grads"])
def test_what_cannot_be_gathered_is_warned_of_once(caplog, why):
    class Rated:
        def apply_grads(self, grads, variables, rate=1.0):
            return [mtf.assign(v, v.value - g * rate) for g, v in zip(grads, variables)]

    optimizer = gs.CrossShardOptimizer(Rated())

    def apply(grads, variables):
        operations = optimizer.apply_grad(grads[0], variables[0])
        if why == "built":
            assert optimizer.step is not None
        if why == "apply_grads":
            operations += optimizer.apply_grads(grads[1:2], variables[1:2])
        own = {"rate": 2.0} if why == "arguments" else {}
        for number in {"twice": (0, 2), "apply_grads": (2,)}.get(why, (1, 2)):
            with tf.variable_scope("scope" if why == "scope" else tf.get_variable_scope()):
                operations += optimizer.apply_grad(grads[number], variables[number], **own)
        return operations

    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        loss, operations = program(apply)
        lowering = mtf.Lowering(loss.graph, {loss.mesh: harness.placement(SHAPE, LAYOUT)})
    assert all(lowering.lowered_operation(op) is not None for op in operations)
    assert optimizer.times_applied == (3 if why == "apply_grads" else 2)
    (warning,) = warnings_of(caplog)
    assert "Call apply_grads(grads, variables) with all pairs" in warning


def test_errors_come_with_the_pair():
    optimizer = gs.CrossShardOptimizer(sgd())

    def apply(grads, variables):
        with pytest.raises(ValueError, match="The gradient of 'b1' has shape"):
            optimizer.apply_grad(grads[0], variables[1])
        with pytest.raises(TypeError, match="cannot be called with"):
            optimizer.apply_grad(grads[0], variables[0], 3.0)
        return optimizer.apply_grad(None, variables[0])

    loss, operations = program(apply)
    assert operations == []
    mtf.Lowering(loss.graph, {loss.mesh: harness.placement(SHAPE, LAYOUT)})


def test_a_step_that_cannot_be_built_stays_to_be_built():
    class Fails:
        def apply_grads(self, grads, variables):
            raise ZeroDivisionError

    optimizer = gs.CrossShardOptimizer(Fails())
    loss, _ = program(lambda grads, variables: optimizer.apply_grad(grads[0], variables[0]))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            mtf.Lowering(loss.graph, {loss.mesh: harness.placement(SHAPE, LAYOUT)})


def test_variables_that_the_program_stacks_itself():
    optimizer = gs.CrossShardOptimizer(models.OPTIMIZERS["momentum"]())
    loss, operations = program(
        lambda grads, variables: [
            op for pair in zip(grads, variables) for op in optimizer.apply_grad(*pair)
        ]
    )
    loss.graph.rewrite_stack_variables()
    mesh_impl = harness.placement(SHAPE, LAYOUT)
    for scope in ("once", "again"):
        with tf.variable_scope(scope):
            lowering = mtf.Lowering(loss.graph, {loss.mesh: mesh_impl}, autostack=False)
        assert len({lowering.lowered_operation(op) for op in operations}) == 1


def test_another_graph_does_not_build_it():
    optimizer = gs.CrossShardOptimizer(sgd())
    with tf.Graph().as_default():
        program(lambda grads, variables: optimizer.apply_grad(grads[0], variables[0]))
    assert optimizer.step is None


def test_a_wrapper_does_not_keep_a_graph_whose_step_is_built():
    optimizer = gs.CrossShardOptimizer(sgd())
    with tf.Graph().as_default():
        graph = program(lambda g, v: optimizer.apply_grad(g[0], v[0]))[0].graph
        assert optimizer.step.plan.graph is graph
        first = weakref.ref(graph)
        del graph
    with tf.Graph().as_default():
        program(optimizer.apply_grads)
    gc.collect()
    assert first() is None


class FailsOnce:
    """An optimizer that has asked another one for operations when it raises, the first time."""

    def __init__(self, other, mesh=None):
        self.other, self.mesh = other, mesh
        self.failed = False

    def apply_grads(self, grads, variables):
        operations = self.other.apply_grads(grads, variables)
        if not self.failed and self.mesh in (None, variables[0].mesh):
            self.failed = True
            raise ZeroDivisionError
        return operations


def assigned_in(graph, *meshes):
    mtf.Lowering(graph, {mesh: harness.placement(SHAPE, LAYOUT) for mesh in meshes})
    assigns = [op for op in graph.operations if isinstance(op, mtf.Assign)]
    return sorted(v.name for op in assigns for v in op.variables)


def test_an_error_undoes_the_pairs_that_its_step_has_gathered():
    inner = PairByPair(gs.CrossShardOptimizer(sgd()))
    optimizer = gs.ClipByGlobalNormOptimizer(FailsOnce(inner), NORM)

    def apply(grads, variables):
        with pytest.raises(ZeroDivisionError):
            optimizer.apply_grads(grads, variables)
        return optimizer.apply_grads(grads, variables)

    loss, _ = program(apply)
    names = sorted(v.name for v in loss.graph.trainable_variables)
    assert assigned_in(loss.graph, loss.mesh) == names


def test_an_error_on_one_mesh_does_not_undo_pairs_of_another():
    graph = mtf.Graph()
    one, other = mtf.Mesh(graph, "one"), mtf.Mesh(graph, "other")
    shape = mtf.Shape([mtf.Dimension("size", 4)])
    x, y = mtf.get_variable(one, "x", shape), mtf.get_variable(other, "y", shape)
    (of_x,), (of_y,) = (mtf.gradients([mtf.reduce_sum(v * v)], [v]) for v in (x, y))
    optimizer = gs.CrossShardOptimizer(FailsOnce(sgd(), other))
    optimizer.apply_grad(of_x, x.operation)
    with pytest.raises(ZeroDivisionError):
        optimizer.apply_grads([of_y], [y.operation])
    optimizer.apply_grads([of_y], [y.operation])
    assert assigned_in(graph, one, other) == ["x", "y"]
    assert optimizer.times_applied == 2
