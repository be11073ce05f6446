"""The numpy model agrees with TensorFlow's SyncReplicasOptimizer where that is deterministic."""

import numpy as np
import pytest

from tests.cluster.sync_replicas_worker import (
    LEARNING_RATE,
    START,
    UPDATES,
    WORKERS,
    center,
    original_trajectory,
)
from tests.optimizers.sync_replicas_reference import SyncReplicas


def model_trajectory(replicas_to_aggregate, contributes):
    def sgd(values, grads):
        return {k: values[k] - LEARNING_RATE * grads[k] for k in values}

    model = SyncReplicas(sgd, WORKERS, replicas_to_aggregate, {"x": np.array(START)})
    seen = [model.values["x"]]
    for _ in range(UPDATES):
        assert model.step([{"x": seen[-1] - center(k)} for k in range(WORKERS)], contributes)
        seen.append(model.values["x"])
    return np.array(seen)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("replicas_to_aggregate", "slow_worker", "first"),
    [(3, None, [10, 6, 4, 3, 2.5, 2.25]), (2, 2, [10, 5.75, 3.625, 2.5625])],
    ids=["3 of 3", "2 of 3, one slow"],
)
def test_original_and_model_take_the_same_path(replicas_to_aggregate, slow_worker, first):
    seen = np.array(original_trajectory(replicas_to_aggregate, slow_worker))
    contributes = [worker != slow_worker for worker in range(WORKERS)]
    # All of it is exact in float32: halves of small whole numbers.
    np.testing.assert_array_equal(seen, model_trajectory(replicas_to_aggregate, contributes))
    np.testing.assert_array_equal(seen[: len(first), 0], first)
