"""TensorFlow's own SyncReplicasOptimizer on a cluster: the program of one task, and who starts it.

Worker k's loss is |x - [k + 1, -2k]|^2 / 2. There are no initial tokens and a worker takes a token
for every gradient, so that workers go in step. A slow worker delivers each gradient after the
update that it was computed for: order, not sleep, makes it slow.

All cases run on the same processes, one after the other, in a container of their own each.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from typing import Any, Callable, Tuple

from mtf_gradsync._private.libraries import tf
from tests import grappler
from tests.runtimes.cluster.processes import Processes

START = (10.0, -10.0)
LEARNING_RATE = 0.5
WORKERS = 3
UPDATES = 5
# How many gradients an update needs: all of the workers that are not slow, or the order of arrival
# decides what the variable becomes; and the worker, not the first, whose every gradient comes too
# late, or -1.
CASES = (3, -1), (2, 2)

Trajectory = Tuple[Tuple[float, ...], ...]


def center(worker: int) -> tuple[float, float]:
    """Where a worker's loss is smallest."""
    return (worker + 1.0, -2.0 * worker)


def original_trajectory(replicas_to_aggregate: int, slow_worker: int | None = None) -> Trajectory:
    """Runs the original on one parameter server and three workers.

    Args:
      replicas_to_aggregate: as in one of `CASES`.
      slow_worker: likewise; None for none.

    Returns:
      The variable at the start and after each of `UPDATES` updates, as all workers saw it.
    """
    slow = -1 if slow_worker is None else slow_worker
    return _original_trajectories()[replicas_to_aggregate, slow]


@functools.lru_cache(maxsize=None)
def _original_trajectories() -> dict[tuple[int, int], Trajectory]:
    with Processes() as processes:
        tasks = processes.start_cluster(__name__, {"ps": 1, "worker": WORKERS})
        outputs = [processes.wait(tasks["worker", task]) for task in range(WORKERS)]
    seen = {output.split("saw ")[1].splitlines()[0] for output in outputs}
    assert len(seen) == 1, f"workers saw different values: {seen}"
    found = json.loads(seen.pop())
    return {case: tuple(tuple(x) for x in one) for case, one in zip(CASES, found)}


def signal(name: str) -> Any:
    """A queue on the parameter server through which workers tell each other to go on."""
    with tf.device("/job:ps/task:0"):
        return tf.FIFOQueue(2 * WORKERS, tf.int32, shapes=(), shared_name=name)


def work(
    spec: dict[str, list[str]], server: Any, task: int, aggregate: int, slow: int
) -> tuple[Any, list[list[float]]]:
    """Takes part in all updates; returns the session, and the variable after each."""
    device = tf.train.replica_device_setter(
        cluster=tf.train.ClusterSpec(spec), worker_device=f"/job:worker/task:{task}"
    )
    with tf.device(device):
        global_step = tf.train.get_or_create_global_step()
        x = tf.get_variable("x", initializer=list(START))
        loss = tf.reduce_sum(tf.square(x - center(task))) / 2
        optimizer = tf.train.SyncReplicasOptimizer(
            tf.train.GradientDescentOptimizer(LEARNING_RATE), aggregate, WORKERS
        )
        step = optimizer.minimize(loss, global_step=global_step)
    chief = task == 0
    hook = optimizer.make_session_run_hook(chief, num_tokens=0)
    initialized, on_time, late = map(signal, ["initialized", "on_time", "late"])
    others = WORKERS - 1
    tell_initialized = initialized.enqueue_many([[0] * others])
    tell_on_time, tell_late = on_time.enqueue(0), late.enqueue_many([[0] * others])
    wait_initialized, wait_on_time = initialized.dequeue(), on_time.dequeue_many(others)
    wait_late = late.dequeue()
    # Nobody waits for the other workers' servers, which may have ended.
    config = tf.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{task}"])
    if not chief:
        # MonitoredTrainingSession itself would look again after 30 seconds.
        with tf.Session(server.target, config=config) as session:
            session.run(wait_initialized)
    session = tf.train.MonitoredTrainingSession(
        server.target, is_chief=chief, hooks=[hook], config=config
    )
    if chief:
        session.run(tell_initialized)
    seen = [session.run(x)]
    if task == slow:
        session.run(tell_late)
    for _ in range(UPDATES):
        if task == slow:
            session.run(wait_on_time)
        elif slow >= 0:
            session.run(wait_late)
        session.run(step)
        seen.append(session.run(x))
        if task == slow:
            session.run(tell_late)
        elif slow >= 0:
            session.run(tell_on_time)
    return session, [value.tolist() for value in seen]


def serve(work: Callable[[dict[str, list[str]], Any, int], None]) -> None:
    """Runs a task as the command line says, by `work`; the parameter server until it is killed."""
    spec, job, task = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    tf.disable_v2_behavior()
    grappler.turn_off()
    tf.logging.set_verbosity(tf.logging.ERROR)
    server = tf.train.Server(spec, job_name=job, task_index=task)
    if job == "ps":
        while True:
            time.sleep(3600)
    work(spec, server, task)


def all_cases(spec: dict[str, list[str]], server: Any, task: int) -> None:
    """Takes part in all cases, and prints what the variable was in them."""
    tf.enable_resource_variables()
    worked = []
    for number, case in enumerate(CASES):
        with tf.Graph().as_default() as graph, graph.container(f"case{number}"):
            worked.append(work(spec, server, task, *case))
    print("saw", json.dumps([seen for _, seen in worked]), flush=True)
    # Closing the chief's sessions would wait for gradients that nobody sends.
    os._exit(0)


if __name__ == "__main__":
    serve(all_cases)
