"""Steps that wait too long for an update are told by type, not by text."""

import collections
import contextlib
import functools
import pickle

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.optimizers.replicas import ReplicaState
from mtf_gradsync.optimizers.skips import NoUpdateError
from tests import harness, models, reference
from tests.properties import sync_replicas_schedules as schedules

MESH, LAYOUT, BATCH_DIMS = harness.MESHES["4"]
SHARDS = 4
# Eight contributions make an update, so that there is none in these.
MASKS = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]], bool)
LIMIT = 2

RunContext = collections.namedtuple("RunContext", ["session"])
Built = collections.namedtuple("Built", ["session", "step", "values", "watch", "hook"])


@functools.lru_cache(maxsize=None)
def made(kind):
    """The program, for the sessions of several tests; its optimizer, and what it exports."""
    optimizers = []

    def build(mesh, inputs):
        opt = gs.SyncReplicasOptimizer(
            models.OPTIMIZERS["momentum"](),
            2 * SHARDS,
            contributes=inputs["contributes"],
            max_steps_without_update=LIMIT,
            axes=gs.ReplicaAxes(MESH, LAYOUT, BATCH_DIMS),
        )
        optimizers.append(opt)
        grads, variables = models.gradients(models.mlp_loss(mesh, inputs, BATCH_DIMS))
        operations = opt.apply_grads(grads, variables)
        # Only tensors that are not split can leave a SIMD program.
        exported = [] if kind == "simd" else [*variables, *opt.state]
        return operations, {v.name: v.value for v in exported}

    feed = {**models.mlp_batches(1)[0], "contributes": MASKS[0]}
    return harness.built(kind, MESH, LAYOUT, build, feed), optimizers[0]


@contextlib.contextmanager
def opened(kind):
    """A session whose `step` is called with a mask of the replicas that contribute."""
    program, opt = made(kind)
    (feed,) = models.mlp_batches(1)
    with program.graph.as_default():
        watch = opt.steps_without_update.watch()
        hook = opt.make_session_run_hook(True)
        hook.begin()
        with program._session() as session:
            if program.program is None:
                session.run(program.init[0])
                session.run(program.restore)

            def step(mask, **changed):
                fed = {**feed, **changed, "contributes": mask}
                session.run(program.updates, {program.inputs[k]: v for k, v in fed.items()})

            yield Built(session, step, program.fetched, watch, hook)


@pytest.mark.mostly_slow
def test_the_watch_names_the_replicas_that_did_not_contribute_last(mesh_kind):
    with opened(mesh_kind) as built:
        for mask in MASKS[:2]:
            built.step(mask)
            assert built.watch.read_report(built.session) is None
        with pytest.raises(
            tf.errors.InvalidArgumentError if mesh_kind != "simd" else NoUpdateError
        ):
            built.step(MASKS[2])
        error = built.watch.read_report(built.session)
    assert isinstance(error, NoUpdateError)
    assert (error.limit, error.replicas) == (LIMIT, [0, 2])
    assert f"max_steps_without_update={LIMIT} steps" in str(error)
    assert str(error).endswith("did not contribute in the last step: [0, 2].")


class TpuSession:
    """A session that does not look at steps, as that of a TPU."""

    def __init__(self, session):
        self._session = session

    def run(self, fetches):
        return self._session.run(fetches)


def test_the_hook_raises_it_where_the_session_does_not():
    with opened("simd") as built:
        session = TpuSession(built.session)
        built.hook.after_create_session(session, None)
        for mask in MASKS[:2]:
            built.step(mask)
            built.hook.after_run(RunContext(session), None)
        with pytest.raises(NoUpdateError):
            built.step(MASKS[2])
        with pytest.raises(NoUpdateError) as raised:
            built.hook.after_run(RunContext(session), None)
    assert isinstance(raised.value, RuntimeError)
    assert raised.value.replicas == [0, 2]


@pytest.mark.slow
def test_steps_that_fail_otherwise_are_not_taken_for_it():
    with opened("placement") as built:
        assert built.watch.read_report(built.session) is None
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            built.step(MASKS[0][:3])
        assert built.watch.read_report(built.session) is None


def test_it_has_no_variables_of_its_own():
    """So there are none to initialize: `opened` initializes global variables and no others."""
    with opened("placement"):
        assert not tf.local_variables()
        names = {v.op.name for v in tf.global_variables()}
        state = {name for name in names if name.startswith("sync_replicas/")}
        assert state == {f"sync_replicas/{field}" for field in ReplicaState._fields}


def test_a_step_that_fails_is_counted_with_all_that_it_added():
    """A program that goes on after the error averages over all that came."""
    masked = tuple((step, int(k)) for step, mask in enumerate(MASKS) for k in np.flatnonzero(~mask))
    schedule = schedules.Schedule((SHARDS,), 2 * SHARDS, 4, sits_out=masked)
    *_, expected = schedules.replay(schedule, reference.OPTIMIZERS["momentum"]())
    failed = []
    with opened("placement") as built:
        for number, feed in enumerate(schedule.feeds()):
            try:
                built.step(feed["contributes"], x=feed["x"], y=feed["y"])
            except tf.errors.InvalidArgumentError:
                failed.append(number)
        found = built.session.run(built.values)
    assert failed == [2]
    assert expected.global_step == found["sync_replicas/update_step"] == 1
    for name in ("made", "dropped", "local_step"):
        actual = found[f"sync_replicas/{name}"].ravel()
        np.testing.assert_array_equal(actual, getattr(expected, name), err_msg=name)
    # One step of 0.05 along a float32 mean of ten gradients below 2.
    reference.assert_close(found, expected.values, 1e-7, 1e-6)


def test_the_error_can_be_sent_to_another_process():
    error = pickle.loads(pickle.dumps(NoUpdateError(5, np.array([1, 3]))))
    assert (error.limit, error.replicas) == (5, [1, 3])
