"""The line about the loss that Estimators log."""

import re

import pytest

import mtf_gradsync as gs
from mtf_gradsync import estimator
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.tools.estimator.hooks import MeanLossHook

LOSSES = [6.0, 2.0, 4.0, 8.0, 1.0, 3.0, 5.0, 7.0]


@pytest.mark.parametrize(
    ("every", "passes", "expected"),
    [
        # The first step has a line at once, as Estimator's own.
        (3, None, {1: 6.0, 4: 14 / 3, 7: 3.0}),
        # Four microbatch steps for an update: no line is of the newest ones alone.
        (1, 4, {1: 6.0, 2: 4.0, 3: 4.0, 4: 5.0, 5: 1.0, 6: 2.0, 7: 3.0, 8: 4.0}),
    ],
)
def test_a_line_is_about_the_steps_since_the_last_one(monkeypatch, every, passes, expected):
    lines = []
    monkeypatch.setattr(tf.logging, "info", lambda text, *values: lines.append(text % values))
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        number = tf.assign_add(step, 1)
        loss = tf.gather(tf.constant(LOSSES), number - 1)
        hook = MeanLossHook(loss, every, None if passes is None else number % passes)
        # The step is read after it was advanced.
        hook.begin()
        hook._fetches["step"] = number
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in LOSSES:
                values = session.run(hook.before_run(None).fetches)
                hook.after_run(None, tf.train.SessionRunValues(values, None, None))
    found = [re.fullmatch(r"loss = (\S+), step = (\d+) \(.* sec\)", line) for line in lines]
    assert {int(m[2]): float(m[1]) for m in found} == pytest.approx(expected, rel=1e-6)


def test_losses_of_microbatches_have_their_weights(monkeypatch):
    """Two means, of 30 and 10 tokens, are an update."""
    lines = []
    monkeypatch.setattr(tf.logging, "info", lambda text, *values: lines.append(text % values))
    with tf.Graph().as_default():
        build = estimator.SpecBuilder(
            tf.estimator.ModeKeys.TRAIN,
            config=tf.estimator.RunConfig(log_step_count_steps=1),
            mesh_shape="all:2",
            layout="batch:all",
        )
        x, tokens = tf.placeholder(tf.float32, []), tf.placeholder(tf.float32, [])
        w = mtf.get_variable(build.mesh, "w", [], initializer=tf.ones_initializer())
        loss = w * mtf.import_tf_tensor(build.mesh, x, mtf.Shape([]))
        optimizer = gs.GradientAccumulationOptimizer(
            mtf.optimize.SgdOptimizer(0.0), 2, average_aggregated_gradients=True
        )
        updates = optimizer.minimize(loss, tf.train.get_or_create_global_step(), weights=tokens)
        spec = build.train(loss, updates, optimizer)
        creator = tf.train.ChiefSessionCreator(
            spec.scaffold, config=gs.session_config(num_cpu_devices=2)
        )
        with tf.train.MonitoredSession(creator, spec.training_chief_hooks) as session:
            for value, weight in ((2.0, 30.0), (4.0, 10.0), (8.0, 20.0)):
                session.run(spec.train_op, {x: value, tokens: weight})
    losses = [float(re.match(r"loss = (\S+), step", x)[1]) for x in lines if "loss = " in x]
    assert losses == [2.0, 2.5, 8.0]
