"""Accumulation for optimizers of tf.compat.v1 on a cluster: each worker has sums of its own."""

import json

import pytest

from tests.cluster.accumulation_worker import MICRO_STEPS, PASSES, WORKERS


@pytest.mark.parametrize("kind", ["resource", "ref"])
def test_each_worker_adds_up_its_own_gradients(processes, kind):
    tasks = processes.start_cluster(
        "tests.cluster.accumulation_worker", {"ps": 1, "worker": WORKERS}, kind
    )
    outputs = [processes.wait(tasks["worker", task]) for task in range(WORKERS)]
    made = MICRO_STEPS // PASSES * PASSES
    # Exact in float32: whole numbers below 2**24.
    expected = -sum((k + 1) * 10.0**i for k in range(WORKERS) for i in range(made))
    for task, output in enumerate(outputs):
        x, global_step = json.loads(output.split("saw ")[1].splitlines()[0])
        assert (x, global_step) == (expected, WORKERS * MICRO_STEPS)
        ps, worker = json.loads(output.split("placed ")[1].splitlines()[0])
        assert ps.startswith("/job:ps")
        assert worker.startswith(f"/job:worker/task:{task}")
