"""Accumulation for an optimizer of tf.compat.v1 on a parameter server and workers: one task.

Worker k's gradient of microbatch step i is (k + 1) * 10**i, whatever the variable is, so that the
order of updates does not matter and every wrong number of microbatch steps shows. There are two
variables, of both kinds, with an optimizer and a step counter each.
"""

from __future__ import annotations

import json
from typing import Any

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import tf
from tests.runtimes.cluster.sync_replicas_worker import serve, signal

WORKERS = 2
PASSES = 3
# The last microbatch step's sum never becomes an update.
MICRO_STEPS = 2 * PASSES + 1
KINDS = "resource", "ref"


def work(spec: dict[str, list[str]], server: Any, task: int) -> None:
    """Makes a worker's microbatch steps; prints the variables when all workers have made theirs."""
    device = tf.train.replica_device_setter(
        cluster=tf.train.ClusterSpec(spec), worker_device=f"/job:worker/task:{task}"
    )
    values, steps, placed = {}, [], {}
    with tf.device(device):
        grad = tf.placeholder(tf.float32, [])
        for kind in KINDS:
            with tf.variable_scope(kind, use_resource=kind == "resource"):
                zeros = tf.zeros_initializer()
                made = tf.get_variable("made", [], tf.int64, zeros, trainable=False)
                x = tf.get_variable("x", [], tf.float32, zeros)
            optimizer = gs.GradientAccumulationOptimizer(
                tf.train.GradientDescentOptimizer(1.0), PASSES
            )
            steps.append(optimizer.minimize(x * grad, made, [x]))
            values[kind] = [x, made]
            state = [v for v in optimizer.variables() if v is not x]
            placed[kind] = sorted({v.device for v in [*state, x]})
    print("placed", json.dumps(placed), flush=True)
    initialized, *finished = map(
        signal, ["initialized", *(f"finished_{worker}" for worker in range(WORKERS))]
    )
    tell_initialized, wait_initialized = initialized.enqueue(0), initialized.dequeue()
    tell_finished = [queue.enqueue(0) for queue in finished]
    wait_finished = finished[task].dequeue_many(WORKERS)
    config = tf.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{task}"])
    if task:
        with tf.Session(server.target, config=config) as session:
            session.run(wait_initialized)
    with tf.train.MonitoredTrainingSession(
        server.target, is_chief=task == 0, config=config
    ) as session:
        if not task:
            session.run(tell_initialized)
        for micro_step in range(MICRO_STEPS):
            session.run(steps, {grad: (task + 1) * 10.0**micro_step})
        session.run(tell_finished)
        session.run(wait_finished)
        seen = {kind: [float(v) for v in found] for kind, found in session.run(values).items()}
        print("saw", json.dumps(seen), flush=True)


if __name__ == "__main__":
    serve(work)
