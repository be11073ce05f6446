"""AverageOptimizer: the warm-up of TensorFlow's averages, means without what they began with."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models

MESH, LAYOUT, _ = harness.MESHES["2x2"]
AXES = gs.ReplicaAxes(MESH, LAYOUT)
D, STEPS = 4, 5
BEGIN = 100.0
VALUES = BEGIN + np.cumsum(np.arange(1.0, STEPS + 1))  # of each element, after each step
FEEDS = [{"x": np.full((4, D), -k, "f")} for k in range(1, STEPS + 1)]


def build(make):
    def build(mesh, inputs):
        batch, d = mtf.Dimension("batch", 4), mtf.Dimension("d", D)
        w = models.variable(mesh, "w", [d], BEGIN)
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, d]))
        grads = mtf.gradients([mtf.reduce_mean(w * x, output_shape=mtf.Shape([d]))], [w])
        optimizer = make(mtf.optimize.SgdOptimizer(1.0), w.operation)
        return optimizer.apply_grads(grads, [w.operation]), {}

    return build


def averages(kind, make, feeds=FEEDS):
    after = harness.built(kind, MESH, LAYOUT, build(make), feeds[0]).after_each(feeds)
    return [x["w/ExponentialMovingAverage"][0] for x in after]


def of_tensorflow(values, decay, **kwargs):
    """What `tf.train.ExponentialMovingAverage` has after each of some values, in float64."""
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.get_variable("x", [], tf.float64, tf.constant_initializer(BEGIN))
        count = tf.get_variable("count", [], tf.int32, tf.zeros_initializer())
        average = tf.train.ExponentialMovingAverage(decay, num_updates=count)
        value = tf.placeholder(tf.float64, [])
        with tf.control_dependencies([tf.assign(x, value), tf.assign_add(count, 1)]):
            move = average.apply([x])
        session.run(tf.global_variables_initializer())
        found = []
        for one in values:
            session.run(move, {value: one})
            found.append(session.run(average.average(x)))
    return found


def without_bias(values, decay):
    """The weighted mean of the values alone, in float64, as `optax.ema(decay, debias=True)`."""
    found = []
    for number in range(1, len(values) + 1):
        weights = decay ** np.arange(number)[::-1]
        found.append(np.average(values[:number], weights=weights))
    return found


@pytest.mark.parametrize("decay", [0.99999, 0.25])
def test_warm_up_as_tensorflow_has_it(decay, mesh_kind):
    found = averages(mesh_kind, lambda opt, w: gs.AverageOptimizer(opt, decay, num_updates=True))
    np.testing.assert_allclose(found, of_tensorflow(VALUES, decay), rtol=1e-6)


def test_a_count_of_the_programs_own(mesh_kind):
    def make(opt, w):
        count = tf.get_variable("own", [], tf.int64, tf.constant_initializer(6), trainable=False)
        return gs.AverageOptimizer(opt, tf.train.ExponentialMovingAverage(0.9, count))

    found = averages(mesh_kind, make, FEEDS[:1])
    by = min(0.9, (1 + 6) / (10 + 6))
    np.testing.assert_allclose(found, [BEGIN * by + VALUES[0] * (1 - by)], rtol=1e-6)


@pytest.mark.parametrize("decay", [0.99999, 0.5, 0.0])
def test_means_of_the_values_alone(decay, mesh_kind):
    found = averages(mesh_kind, lambda opt, w: gs.AverageOptimizer(opt, decay, zero_debias=True))
    np.testing.assert_allclose(found, without_bias(VALUES, decay), rtol=1e-6)
    assert found[0] == VALUES[0]


@pytest.mark.parametrize("outer", ["average", "accumulation", "sync replicas"])
def test_updates_count_and_not_steps(outer, mesh_kind):
    """An update of every second step's sums."""

    def make(opt, w):
        if outer == "sync replicas":
            rule = tf.train.ExponentialMovingAverage(0.99999, zero_debias=True)
            return gs.SyncReplicasOptimizer(
                opt, 4, variable_averages=rule, variables_to_average=[w], axes=AXES
            )
        if outer == "average":
            opt = gs.GradientAccumulationOptimizer(opt, 2, axes=AXES)
            return gs.AverageOptimizer(opt, 0.99999, zero_debias=True)
        opt = gs.AverageOptimizer(opt, 0.99999, zero_debias=True)
        return gs.GradientAccumulationOptimizer(opt, 2, axes=AXES)

    found = averages(mesh_kind, make, FEEDS[:4])
    steps = [BEGIN + 3.0, BEGIN + 10.0]
    if outer == "sync replicas":  # an update is the mean over two steps of two replicas
        steps = [BEGIN + 1.5, BEGIN + 5.0]
    mean = without_bias(steps, 0.99999)
    np.testing.assert_allclose(found, [BEGIN, mean[0], mean[0], mean[1]], rtol=1e-6)


def test_decay_as_a_tensor(mesh_kind):
    found = averages(mesh_kind, lambda opt, w: gs.AverageOptimizer(opt, tf.constant(0.75)))
    expected, average = [], BEGIN
    for value in VALUES:
        average = average * 0.75 + value * 0.25
        expected.append(average)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_settings_are_given_once():
    rule = tf.train.ExponentialMovingAverage(0.9, zero_debias=True)
    with pytest.raises(ValueError, match="once"):
        gs.AverageOptimizer(mtf.optimize.SgdOptimizer(1.0), rule, num_updates=True)
