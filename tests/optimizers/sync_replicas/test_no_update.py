"""Steps that wait too long for an update are told by type, not by text."""

import collections
import contextlib
import pickle

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.sync_replicas import NoUpdateError
from tests import harness, models

MESH, LAYOUT, BATCH_DIMS = harness.MESHES["4x2"]
SHARDS = 4
# Eight contributions make an update, so that there is none in these.
MASKS = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]], bool)
LIMIT = 2

RunContext = collections.namedtuple("RunContext", ["session"])
Built = collections.namedtuple("Built", ["session", "step", "optimizer", "watch", "hook"])


@contextlib.contextmanager
def opened(kind):
    """A session whose `step` is called with a mask of the replicas that contribute."""
    feed = models.mlp_batches(1)[0]
    inputs = {k: tf.placeholder(tf.as_dtype(v.dtype), v.shape) for k, v in feed.items()}
    contributes = tf.placeholder(tf.bool, [SHARDS])
    with simd.tpu_program(MESH, LAYOUT) if kind == "simd" else contextlib.nullcontext() as program:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        opt = gs.SyncReplicasOptimizer(
            models.OPTIMIZERS["momentum"](),
            2 * SHARDS,
            contributes=contributes,
            max_steps_without_update=LIMIT,
            axes=gs.ReplicaAxes(MESH, LAYOUT, BATCH_DIMS),
        )
        variables = graph.trainable_variables
        loss = models.mlp_loss(mesh, inputs, BATCH_DIMS)
        grads = mtf.gradients([loss], [v.value for v in variables])
        operations = opt.apply_grads(grads, variables)
        mesh_impl = program.mesh_impl if program else harness.placement(MESH, LAYOUT)
        lowering = mtf.Lowering(graph, {mesh: mesh_impl})
        update = [lowering.lowered_operation(op) for op in operations]
    watch = opt.limit.watch()
    hook = opt.make_session_run_hook(True)
    hook.begin()

    @contextlib.contextmanager
    def placement_session():
        copy = lowering.copy_masters_to_slices()
        initialize = tf.global_variables_initializer()
        with tf.Session(config=gs.session_config(num_cpu_devices=8)) as session:
            session.run(initialize)
            session.run(copy)
            yield session

    with program.session(lowering) if program else placement_session() as session:

        def step(mask, **changed):
            fed = {inputs[k]: changed.get(k, v) for k, v in feed.items()}
            session.run(update, {**fed, contributes: mask})

        yield Built(session, step, opt, watch, hook)


def test_the_watch_names_the_replicas_that_did_not_contribute_last(mesh_kind):
    with opened(mesh_kind) as built:
        for mask in MASKS[:2]:
            built.step(mask)
            assert built.watch.error(built.session) is None
        if mesh_kind == "simd":
            built.step(MASKS[2])
        else:
            with pytest.raises(tf.errors.InvalidArgumentError):
                built.step(MASKS[2])
        error = built.watch.error(built.session)
    assert isinstance(error, NoUpdateError)
    assert (error.limit, error.replicas) == (LIMIT, [0, 2])
    assert f"max_steps_without_update={LIMIT} steps" in str(error)
    assert str(error).endswith("did not contribute in the last step: [0, 2].")


def test_the_hook_raises_it_on_a_simd_mesh():
    with opened("simd") as built:
        for mask in MASKS[:2]:
            built.step(mask)
            built.hook.after_run(RunContext(built.session), None)
        built.step(MASKS[2])
        with pytest.raises(NoUpdateError) as raised:
            built.hook.after_run(RunContext(built.session), None)
    assert raised.value.replicas == [0, 2]


def test_steps_that_fail_otherwise_are_not_taken_for_it():
    with opened("placement") as built:
        assert built.watch.error(built.session) is None
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            built.step(MASKS[0][:3])
        assert built.watch.error(built.session) is None


def test_what_it_keeps_is_in_no_checkpoint():
    with opened("placement"):
        names = {v.op.name for v in tf.global_variables()}
        assert not any("found" in name for name in names)
        kept = [v for v in tf.local_variables() if "found" in v.op.name]
        assert [v.shape.num_elements() for v in kept] == [1, SHARDS]


def test_the_error_can_be_sent_to_another_process():
    error = pickle.loads(pickle.dumps(NoUpdateError(5, np.array([1, 3]))))
    assert (error.limit, error.replicas) == (5, [1, 3])
