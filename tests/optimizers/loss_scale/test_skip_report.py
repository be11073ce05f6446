"""A skipped step names variables and shards, where it prints and where a session logs."""

import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

SHAPE, LAYOUT = "rows:4;cols:2", "batch:rows;hidden:cols"


def program(make):
    """Two variables, whose gradients are sums over the batch of two inputs."""

    def build(mesh, inputs):
        batch, dim = mtf.Dimension("batch", 4), mtf.Dimension("hidden", 2)
        losses = []
        for name in ("u", "v"):
            given = mtf.import_tf_tensor(mesh, inputs[f"of_{name}"], mtf.Shape([batch, dim]))
            value = mtf.get_variable(mesh, name, mtf.Shape([dim]), tf.float16)
            losses.append(mtf.reduce_sum(mtf.cast(given, tf.float16) * value))
        optimizer = make()
        return optimizer.minimize(losses[0] + losses[1]), {"scale": optimizer.scale.value}

    return build


def feed(**bad):
    """Ones, and values for some rows of the batch."""
    values = {f"of_{name}": np.ones([4, 2], "f") for name in ("u", "v")}
    for name, rows in bad.items():
        for row, value in rows.items():
            values[f"of_{name}"][row, 1] = value
    return values


FEEDS = [
    feed(),
    feed(v={2: np.nan}),
    feed(u={0: np.inf}, v={1: np.nan, 3: np.inf}),
    feed(),
    feed(v={0: np.nan}),  # the third: no line
    # Scaled by 2^10: the shards' own, 2^15, are finite in float16, their sum is not.
    feed(u=dict.fromkeys(range(4), 32.0)),
]
BEGIN = "LossScaleOptimizer: step skipped, gradients that are not finite: "
SO_FAR = "skipped so far; the next line is at twice as many."
LINES = [
    BEGIN + "v (shard 2).",
    BEGIN + f"u (shard 0), v (shard 1), v (shard 3). 2 {SO_FAR}",
    BEGIN + f"u (sum over shards). 4 {SO_FAR}",
]


def make():
    inner = mtf.optimize.SgdOptimizer(0.1)
    return gs.LossScaleOptimizer(gs.CrossShardOptimizer(inner), initial_scale=2.0**13)


def test_a_placement_mesh_prints(capfd):
    with tf.Graph().as_default():
        harness.run("placement", SHAPE, LAYOUT, program(make), FEEDS)
    printed = [line for line in capfd.readouterr().err.splitlines() if line.startswith(BEGIN)]
    assert printed == LINES


@pytest.mark.parametrize("kind", ["simd", "xla"])
def test_the_session_logs_once(kind, caplog):
    """A hook beside it, as a program for TPUs has one, does nothing."""
    hooks = []

    def made():
        optimizer = make()
        hooks.append(optimizer.make_session_run_hook())
        return optimizer

    built = harness.built(kind, SHAPE, LAYOUT, program(made), FEEDS[0])
    (hook,) = hooks
    with built.graph.as_default(), caplog.at_level(logging.WARNING, "mtf_gradsync"):
        hook.begin()
        with built._session() as session:
            hook.after_create_session(session, None)
            for values in FEEDS:
                fed = {built.inputs[name]: value for name, value in values.items()}
                session.run([built.fetched, built.updates], fed)
                hook.after_run(tf.train.SessionRunContext(None, session), None)
    logged = [record.getMessage() for record in caplog.records]
    assert [line for line in logged if line.startswith(BEGIN)] == LINES


def test_a_hook_needs_gradients():
    hook = make().make_session_run_hook()
    with pytest.raises(ValueError, match="has no step yet"):
        hook.begin()


@pytest.mark.slow
def test_long_lists_are_cut(capfd):
    def build(mesh, inputs):
        loss = None
        for number in range(10):
            dim = mtf.Dimension("batch", 4)
            value = mtf.get_variable(mesh, f"v{number}", mtf.Shape([]))
            given = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([dim]))
            term = mtf.reduce_sum(given) * value
            loss = term if loss is None else loss + term
        return gs.LossScaleOptimizer(mtf.optimize.SgdOptimizer(0.1)).minimize(loss), {}

    harness.run("placement", "all:4", "batch:all", build, [{"x": np.full(4, np.inf, "f")}])
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith(BEGIN)]
    assert line.endswith("v7 (shard 0) and 32 more.")
