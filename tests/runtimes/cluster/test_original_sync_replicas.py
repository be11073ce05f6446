"""TensorFlow's SyncReplicasOptimizer where it is deterministic: the mesh takes the same path."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, reference
from tests.optimizers.sync_replicas.sync_replicas_reference import SyncReplicas
from tests.runtimes.cluster.sync_replicas_worker import (
    LEARNING_RATE,
    START,
    UPDATES,
    WORKERS,
    center,
    original_trajectory,
)
from tests.sessions import session_of, step

CASES = pytest.mark.parametrize(
    ("replicas_to_aggregate", "slow_worker", "first"),
    [(3, None, [10, 6, 4, 3, 2.5, 2.25]), (2, 2, [10, 5.75, 3.625, 2.5625])],
    ids=["3 of 3", "2 of 3, one slow"],
)
EPS = np.finfo(np.float32).eps
MESH, LAYOUT = f"all:{WORKERS}", "batch:all"


def model_trajectory(replicas_to_aggregate, contributes):
    sgd = reference.Sgd(LEARNING_RATE)
    model = SyncReplicas(sgd, WORKERS, replicas_to_aggregate, {"x": np.array(START)})
    seen = [model.values["x"]]
    for _ in range(UPDATES):
        assert model.step([{"x": seen[-1] - center(k)} for k in range(WORKERS)], contributes)
        seen.append(model.values["x"])
    return np.array(seen)


def mesh_trajectory(kind, replicas_to_aggregate, slow_worker, how, pending):
    """The variable after each step; the slow worker is masked, or stale as in the original."""
    contributes = np.ones(WORKERS, bool)
    if how == "masked":
        contributes[slow_worker] = False

    def build(mesh, inputs):
        batch, features = mtf.Dimension("batch", WORKERS), mtf.Dimension("features", 2)
        x = mtf.get_variable(
            mesh, "x", mtf.Shape([features]), initializer=tf.constant_initializer(START)
        )
        centers = [center(k) for k in range(WORKERS)]
        centers = mtf.import_tf_tensor(mesh, np.array(centers, "f"), mtf.Shape([batch, features]))
        # One loss for each replica, or their mean.
        loss = mtf.reduce_sum(mtf.square(x - centers), reduced_dim=features) / 2
        loss = loss if pending else mtf.reduce_mean(loss)
        opt = gs.SyncReplicasOptimizer(
            mtf.optimize.SgdOptimizer(LEARNING_RATE),
            replicas_to_aggregate,
            WORKERS,
            contributes=inputs["contributes"],
            local_steps=inputs["local_steps"] if how == "stale" else None,
            mesh_shape=MESH,
            layout=LAYOUT,
        )
        ((grad, variable),) = opt.compute_gradients(loss)
        grad = grad if pending else gs.per_shard([grad], opt.axes)[0]
        return opt.apply_gradients([(grad, variable)], tf.train.get_or_create_global_step()), {}

    feeds = []
    for update in range(UPDATES):
        local_steps = np.full(WORKERS, update, np.int32)
        if how == "stale":
            # It computed its gradient before the update that the others have seen.
            local_steps[slow_worker] -= 1
        feeds.append({"contributes": contributes, "local_steps": local_steps})
    made = harness.built(kind, MESH, LAYOUT, build, feeds[0])
    with session_of(made) as session:
        seen = [session.variables(), *(step(made, session, feed) for feed in feeds)]
    made = [UPDATES * (worker != slow_worker) for worker in range(WORKERS)]
    assert seen[-1]["global_step"] == UPDATES
    assert list(seen[-1]["sync_replicas/made"]) == made
    assert list(seen[-1]["sync_replicas/dropped"]) == [UPDATES - n for n in made]
    return np.array([values["x"] for values in seen])


@pytest.mark.slow
@pytest.mark.cluster
@CASES
def test_original_and_model_take_the_same_path(replicas_to_aggregate, slow_worker, first):
    seen = np.array(original_trajectory(replicas_to_aggregate, slow_worker))
    contributes = [worker != slow_worker for worker in range(WORKERS)]
    # All of it is exact in float32: halves of small whole numbers.
    np.testing.assert_array_equal(seen, model_trajectory(replicas_to_aggregate, contributes))
    np.testing.assert_array_equal(seen[: len(first), 0], first)


@pytest.mark.cluster
@CASES
@pytest.mark.slow
def test_original_and_mesh_take_the_same_path(mesh_kind, replicas_to_aggregate, slow_worker, first):
    seen = np.array(original_trajectory(replicas_to_aggregate, slow_worker))
    np.testing.assert_array_equal(seen[: len(first), 0], first)
    for how in ["as they are"] if slow_worker is None else ["masked", "stale"]:
        args = (mesh_kind, replicas_to_aggregate, slow_worker, how)
        for pending in (False, True):
            found = mesh_trajectory(*args, pending=pending)
            # Thirds are not exact: a few roundings an update.
            np.testing.assert_allclose(found, seen, rtol=4 * UPDATES * EPS, err_msg=how)
