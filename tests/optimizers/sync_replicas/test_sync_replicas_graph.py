"""What the graph of synchronous replicas says, and sessions that restore it."""

import functools

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference
from tests.optimizers.accumulation.accumulation_runs import (
    gradient_rows,
    report_without_update,
    simd_report,
)

MESH, LAYOUT, BATCH_DIMS = harness.MESHES["4x2"]
SHARDS = 4


def make(replicas_to_aggregate, mesh_shape=MESH, **kwargs):
    return gs.SyncReplicasOptimizer(
        models.OPTIMIZERS["momentum"](),
        replicas_to_aggregate,
        mesh_shape=mesh_shape,
        layout=LAYOUT,
        batch_dims=BATCH_DIMS,
        **kwargs,
    )


@functools.lru_cache(maxsize=None)
def bare_report():
    return simd_report(models.OPTIMIZERS["momentum"], MESH)


@pytest.mark.parametrize("replicas_to_aggregate", [3, SHARDS, 2 * SHARDS])
@pytest.mark.mostly_slow
def test_gradients_are_reduced_together_and_with_an_update_only(replicas_to_aggregate):
    report = simd_report(lambda: make(replicas_to_aggregate), MESH)
    bare = bare_report()
    gradients = [row for row in gradient_rows(report) if row.is_conditional]
    assert len({row.together for row in gradients}) == 1
    sent, sent_bare = (sum(x.bytes_per_step for x in y) for y in (gradients, gradient_rows(bare)))
    assert sent == sent_bare
    # On every step: who contributes, one number a replica on either axis.
    more = report.every_step.bytes_per_core - report_without_update(MESH).every_step.bytes_per_core
    assert 0 < more <= 4 * (1 + SHARDS)


def mask(step):
    """One of two contributes in every third step, both in the others."""
    return np.array([True, step % 3 > 0])


def train(directory, first, last, hook_first):
    """Takes steps from the newest checkpoint in a directory, and writes another."""
    directory.mkdir(exist_ok=True)
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        batches = models.mlp_batches(last)
        inputs = {k: tf.placeholder(tf.float32, v.shape) for k, v in batches[0].items()}
        contributes = tf.placeholder(tf.bool, [2])
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        mesh_shape = "rows:2;cols:1"
        opt = make(3, mesh_shape, contributes=contributes, max_steps_without_update=5)
        loss = models.mlp_loss(mesh, inputs, BATCH_DIMS)
        operations = opt.minimize(loss, tf.train.get_global_step())
        lowering = mtf.Lowering(graph, {mesh: harness.placement(mesh_shape, LAYOUT)})
        step = [lowering.lowered_operation(op) for op in operations]
        to_masters = lowering.copy_slices_to_masters()
        masters = {v.op.name: v for v in tf.global_variables()}
        saver = tf.train.Saver()
        hooks = [mtf.MtfRestoreHook(lowering), opt.make_session_run_hook(is_chief=True)]
        creator = tf.train.ChiefSessionCreator(
            tf.train.Scaffold(saver=saver),
            config=gs.session_config(num_cpu_devices=2),
            checkpoint_dir=str(directory),
        )

        def save(step_context):
            return saver.save(step_context.session, str(directory / "model.ckpt"), last)

        with tf.train.MonitoredSession(creator, hooks[::-1] if hook_first else hooks) as session:
            for number in range(first, last):
                values = {inputs[k]: v for k, v in batches[number].items()}
                session.run(step, {**values, contributes: mask(number)})
            session.run(to_masters)
            session.run_step_fn(save)
            return session.run(masters)


@pytest.mark.slow
def test_monitored_sessions_go_on_where_another_ended(tmp_path):
    """Updates take three contributions, so that some are pending when a session ends.

    The optimizer's hook stands before the one that restores, and behind it.
    """
    whole = train(tmp_path / "whole", 0, 7, hook_first=False)
    pending = train(tmp_path / "parts", 0, 3, hook_first=True)
    train(tmp_path / "parts", 3, 5, hook_first=False)
    parts = train(tmp_path / "parts", 5, 7, hook_first=True)
    assert pending["sync_replicas/count"] > 0
    assert whole["global_step"] > pending["global_step"] > 0
    reference.assert_equal(parts, whole)
