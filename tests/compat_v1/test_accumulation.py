"""Accumulation for optimizers of tf.compat.v1: the update of all microbatch steps, once."""

import contextlib
import functools
import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE, tf
from tests.compat_v1 import optimizers
from tests.runtimes.cluster.processes import Processes

PASSES = 3
INNER = {
    "momentum": lambda: tf.train.MomentumOptimizer(0.05, 0.9),
    "adam": lambda: tf.train.AdamOptimizer(0.02, epsilon=1e-3),
}


def assert_close(actual, expected):
    """At most 4 updates, of sums of 3 gradients."""
    optimizers.assert_close(actual, expected, 4 * PASSES)


@contextlib.contextmanager
def control_flow(version):
    before = tf.control_flow_v2_enabled()
    (tf.enable_control_flow_v2 if version == 2 else tf.disable_control_flow_v2)()
    try:
        yield
    finally:
        (tf.enable_control_flow_v2 if before else tf.disable_control_flow_v2)()


def placeholders():
    return {n: tf.placeholder(tf.float32, v.shape) for n, v in optimizers.batches(1)[0].items()}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize(("flow", "use_resource"), [(1, True), (1, False), (2, True), (2, False)])
def test_an_update_is_that_of_all_its_micro_steps(inner, average, flow, use_resource):
    feeds = optimizers.batches(4 * PASSES)
    with tf.Graph().as_default(), control_flow(flow):
        inputs = placeholders()
        loss, variables = optimizers.plain_model(inputs, use_resource)
        step = tf.train.get_or_create_global_step()
        optimizer = gs.GradientAccumulationOptimizer(
            INNER[inner](), PASSES, average_aggregated_gradients=average
        )
        update = optimizer.minimize(loss, step, variables)
        state = {v.op.name: v for v in tf.global_variables() if v is not step}
        seen = []
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            seen.append(session.run(state))
            for number, feed in enumerate(feeds, 1):
                session.run(update, {inputs[n]: v for n, v in feed.items()})
                assert session.run(step) == number
                count = next(v for v in optimizer.variables() if "mini_step" in v.name)
                assert session.run(count) == number % PASSES
                seen.append(session.run(state))
        assert optimizer.get_slot_names() == optimizer.opt.get_slot_names()
        slot = optimizer.get_slot(variables[0], optimizer.get_slot_names()[0])
        assert slot.op.name in state
        assert tf.get_collection(tf.GraphKeys.TRAIN_OP) == [update]
    for number in range(1, len(seen)):
        if number % PASSES:
            for name in state:
                np.testing.assert_array_equal(seen[number][name], seen[number - 1][name])
    expected = large_batches(inner, len(feeds), average)
    assert_close(seen[-1], {name: expected[name] for name in state})


@functools.lru_cache(maxsize=None)
def large_batches(inner, steps, average):
    """The same updates by the optimizer alone, each of the micro batches of one update."""
    feeds = optimizers.batches(steps)
    with tf.Graph().as_default():
        inputs = [placeholders() for _ in range(PASSES)]
        losses, variables = [], None
        for given in inputs:
            with tf.variable_scope("", reuse=variables is not None):
                loss, variables = optimizers.plain_model(given)
            losses.append(loss)
        total = tf.add_n(losses) * (1.0 / PASSES if average else 1.0)
        update = INNER[inner]().minimize(total, var_list=variables)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for begin in range(0, len(feeds), PASSES):
                feed = {}
                for given, values in zip(inputs, feeds[begin : begin + PASSES]):
                    feed.update({given[n]: v for n, v in values.items()})
                session.run(update, feed)
            return session.run({v.op.name: v for v in tf.global_variables()})


def small_model():
    """A variable with a gradient, one without, and an embedding with a sparse one."""
    with tf.variable_scope("", use_resource=True):
        used, unused, table = (
            tf.get_variable(name, [3], initializer=tf.ones_initializer())
            for name in ("used", "unused", "table")
        )
    rows = tf.placeholder(tf.int32, [None])
    loss = tf.reduce_sum(used * 2.0) + tf.reduce_sum(tf.gather(table, rows))
    return loss, [unused, used, table], rows


def test_gradients_that_are_none_keep_their_places_and_sparse_ones_become_dense():
    loss, variables, rows = small_model()
    optimizer = gs.GradientAccumulationOptimizer(
        tf.train.MomentumOptimizer(1.0, 0.0), 2, sparse_as_dense=True
    )
    pairs = optimizer.compute_gradients(loss, variables)
    assert pairs[0][0] is None
    assert isinstance(pairs[2][0], tf.IndexedSlices)
    update = optimizer.apply_gradients(pairs)
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(update, {rows: [0, 0, 1]})
        session.run(update, {rows: [1]})
        values = session.run(variables)
    np.testing.assert_array_equal(values, [[1, 1, 1], [-3, -3, -3], [-1, -1, 1]])


def test_sparse_gradients_are_refused_before_anything_is_made():
    loss, variables, _ = small_model()
    optimizer = gs.GradientAccumulationOptimizer(tf.train.AdamOptimizer(1.0), 2)
    pairs = optimizer.compute_gradients(loss, variables)
    before = len(tf.get_default_graph().get_operations())
    with pytest.raises(ValueError, match=r"'table:0' is tf.IndexedSlices.*sparse_as_dense=True"):
        optimizer.apply_gradients(pairs)
    with pytest.raises(ValueError, match=r"No gradients provided.*unused"):
        optimizer.apply_gradients(pairs[:1])
    assert len(tf.get_default_graph().get_operations()) == before
    assert optimizer.variables() == []


@pytest.mark.parametrize("flow", [1, 2])
@pytest.mark.parametrize("passes", [1, 3])
def test_the_allreduce_function_runs_once_an_update(flow, passes):
    loss, variables, rows = small_model()
    made, ran = [], []

    def allreduce(grads, owners):
        made.append([v.op.name for v in owners])

        def note(grad):
            ran.append(grad)
            return grad

        first = tf.py_func(note, [grads[0]], tf.float32, stateful=True)
        first.set_shape(grads[0].shape)
        return [10.0 * first, *grads[1:]]

    with control_flow(flow):
        optimizer = gs.GradientAccumulationOptimizer(
            tf.train.GradientDescentOptimizer(1.0),
            passes,
            average_aggregated_gradients=True,
            sparse_as_dense=True,
            allreduce_fn=allreduce,
        )
        update = optimizer.minimize(loss, var_list=variables)
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        for _ in range(6):
            session.run(update, {rows: [2]})
        values = session.run(variables[1])
    assert made == [["used", "table"]]
    assert len(ran) == 6 // passes
    np.testing.assert_allclose(ran[-1], np.full(3, 2.0 * passes))
    np.testing.assert_allclose(values, np.full(3, 1 - 20.0 * len(ran)))


def test_an_allreduce_function_that_loses_gradients_is_an_error():
    loss, variables, _ = small_model()
    optimizer = gs.GradientAccumulationOptimizer(
        tf.train.GradientDescentOptimizer(1.0),
        2,
        sparse_as_dense=True,
        allreduce_fn=lambda grads, _: grads[:1],
    )
    with pytest.raises(ValueError, match="got 2 gradients and returned 1"):
        optimizer.minimize(loss, var_list=variables)


def test_one_pass_is_the_optimizer_inside():
    loss, variables, _ = small_model()
    inner = tf.train.MomentumOptimizer(1.0, 0.9)
    # Sparse gradients, too, are its own.
    optimizer = gs.GradientAccumulationOptimizer(inner, 1)
    optimizer.minimize(loss, var_list=variables)
    assert tf.local_variables() == []
    assert optimizer.variables() == inner.variables()


def test_sums_of_narrow_gradients_are_wide_unless_told():
    def sums(**arguments):
        with tf.Graph().as_default():
            w = tf.get_variable("w", [3], tf.bfloat16, tf.ones_initializer(), use_resource=True)
            optimizer = gs.GradientAccumulationOptimizer(
                tf.train.GradientDescentOptimizer(1.0), 4, **arguments
            )
            update = optimizer.apply_gradients([(tf.constant(1e-3, tf.bfloat16, [3]), w)])
            with tf.Session() as session:
                session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
                session.run(update)
            return [v.dtype.base_dtype for v in optimizer.variables()]

    assert sums() == [tf.int32, tf.float32]
    assert sums(accumulator_dtype=tf.bfloat16) == [tf.int32, tf.bfloat16]


def test_in_a_monitored_training_session():
    feeds = optimizers.batches(2 * PASSES)
    inputs = placeholders()
    loss, variables = optimizers.plain_model(inputs)
    step = tf.train.get_or_create_global_step()
    update = gs.GradientAccumulationOptimizer(INNER["adam"](), PASSES).minimize(loss, step)
    with tf.train.MonitoredTrainingSession() as session:
        for feed in feeds:
            session.run(update, {inputs[n]: v for n, v in feed.items()})
        values = session.run({v.op.name: v for v in variables})
        assert session.run(step) == len(feeds)
    expected = large_batches("adam", len(feeds), False)
    assert_close(values, {name: expected[name] for name in values})


@pytest.mark.skipif(not ESTIMATOR_AVAILABLE, reason="TensorFlow has no Estimator")
def test_under_estimator(tmp_path):
    feeds = optimizers.batches(2 * PASSES)

    def model_fn(features, mode):
        loss, _ = optimizers.plain_model(features)
        optimizer = gs.GradientAccumulationOptimizer(INNER["adam"](), PASSES)
        update = optimizer.minimize(loss, tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=update)

    def input_fn():
        stacked = {n: np.stack([f[n] for f in feeds]) for n in feeds[0]}
        return tf.data.Dataset.from_tensor_slices(stacked)

    estimator = tf.estimator.Estimator(model_fn, str(tmp_path))
    estimator.train(input_fn)
    expected = large_batches("adam", len(feeds), False)
    assert estimator.get_variable_value("global_step") == len(feeds)
    assert not [n for n in estimator.get_variable_names() if "Accumulation" in n]
    assert_close({name: estimator.get_variable_value(name) for name in expected}, expected)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"backward_passes_per_step": 0}, ValueError, "whole number.*got 0"),
        ({"backward_passes_per_step": 1.5}, ValueError, "whole number.*1.5"),
        ({"backward_passes_per_step": lambda step: 2}, TypeError, "schedule"),
        (
            {"backward_passes_per_step": 2, "should_skip_update_fn": gs.skip_not_finite},
            ValueError,
            "should_skip_update_fn",
        ),
        ({"backward_passes_per_step": 2, "accumulator_dtype": tf.int32}, ValueError, "floating"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        gs.GradientAccumulationOptimizer(tf.train.AdamOptimizer(0.1), **arguments)


def test_sync_replicas_and_accumulation_refuse_each_other():
    adam = tf.train.AdamOptimizer(0.1)
    sync = gs.SyncReplicasOptimizer(adam, 2)
    for inner in (sync, gs.CrossShardOptimizer(sync)):
        with pytest.raises(ValueError, match="replicas_to_aggregate multiplied by 2"):
            gs.GradientAccumulationOptimizer(inner, 2)
    for inner in (adam, gs.CrossShardOptimizer(adam)):
        inner = gs.GradientAccumulationOptimizer(inner, 2)
        with pytest.raises(ValueError, match="multiply replicas_to_aggregate by"):
            gs.SyncReplicasOptimizer(inner, 2)


def test_each_graph_has_state_of_its_own():
    optimizer = gs.GradientAccumulationOptimizer(tf.train.MomentumOptimizer(0.1, 0.9), 2)
    for _ in range(2):
        with tf.Graph().as_default():
            w = tf.get_variable("w", [3], use_resource=True)
            optimizer.apply_gradients([(tf.ones([3]), w)])
            assert len(optimizer.variables()) == 3
            tf.variables_initializer(optimizer.variables())


@pytest.mark.slow
def test_eager_execution_is_refused():
    code = (
        "import tensorflow as tf; import mtf_gradsync as gs\n"
        "v1 = tf.compat.v1; w = tf.Variable([1.0])\n"
        "opt = gs.GradientAccumulationOptimizer(v1.train.AdamOptimizer(0.1), 2)\n"
        "step = lambda: opt.apply_gradients([(tf.ones([1]), w)])\n"
        "for run in (step, tf.function(step)):\n"
        "    try: run()\n"
        "    except RuntimeError as error: print(error)\n"
    )
    with Processes() as processes:
        printed = processes.wait(processes.fork("-c", code))
    assert printed.count("makes operations for sessions") == 2


def test_a_schedule_of_the_global_step_gets_a_hint(caplog):
    step = tf.train.get_or_create_global_step()
    rate = tf.train.exponential_decay(0.1, step, 10, 0.5)
    adam = tf.train.AdamOptimizer(rate)
    for opt in (adam, gs.CrossShardOptimizer(adam), gs.MeshOptimizer(adam)):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="mtf_gradsync"):
            gs.GradientAccumulationOptimizer(opt, 2)
        assert "counts microbatch steps" in caplog.text


def test_a_mesh_optimizer_takes_no_allreduce_function():
    with pytest.raises(ValueError, match="reducer="):
        gs.GradientAccumulationOptimizer(
            gs.MeshOptimizer(tf.train.AdamOptimizer(0.1)), 2, allreduce_fn=lambda g, v: g
        )
