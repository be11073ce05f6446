"""Accumulation for optimizers of tf.compat.v1 on a cluster: each worker has sums of its own."""

import json

import pytest

from tests.runtimes.cluster.accumulation_worker import KINDS, MICRO_STEPS, PASSES, WORKERS


@pytest.mark.slow
def test_each_worker_adds_up_its_own_gradients(processes):
    tasks = processes.start_cluster(
        "tests.runtimes.cluster.accumulation_worker", {"ps": 1, "worker": WORKERS}
    )
    outputs = [processes.wait(tasks["worker", task]) for task in range(WORKERS)]
    made = MICRO_STEPS // PASSES * PASSES
    # Exact in float32: whole numbers below 2**24.
    expected = -sum((k + 1) * 10.0**i for k in range(WORKERS) for i in range(made))
    for task, output in enumerate(outputs):
        seen, placed = (
            json.loads(output.split(f"{word} ")[1].splitlines()[0]) for word in ("saw", "placed")
        )
        for kind in KINDS:
            assert seen[kind] == [expected, WORKERS * MICRO_STEPS], kind
            ps, worker = placed[kind]
            assert ps.startswith("/job:ps")
            assert worker.startswith(f"/job:worker/task:{task}")
