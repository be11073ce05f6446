"""Joins the tasks of a cluster, and ends all of them with an error when one is lost."""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any, Mapping, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._signals import StopSignal
from mtf_gradsync.cluster.task import Task, task_of_environment, task_of_spec
from mtf_gradsync.processes.meeting import Place, meet
from mtf_gradsync.processes.members import Member, ProcessesError
from mtf_gradsync.processes.watchdog import Membership, Watchdog
from mtf_gradsync.session import session_config

# What a session may raise when a task is gone.
_LOSSES = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)


class Cluster(Membership):
    """This process as a task of a cluster. Use it as a context manager around all work on the mesh.

    The chief works inside the context. Any other task that reaches its end serves its devices until
    the chief reaches the end, too. An exception that leaves the context of one task ends the other
    tasks with an error that quotes it.

    Attributes:
      task: the task that this process is.
      is_chief: whether it is the one that builds the graph and runs the session: task 0 of the job
        "chief", or of "worker" where there is no chief.
      target: argument of ``tf.Session(target)``, and ``master=`` of monitored sessions.
      config: the ConfigProto of the server, for sessions.
      devices: strings of the CPU devices of all tasks, task by task, the chief's first.
    """

    def __init__(self, task: Task, server: Any, config: tf.ConfigProto, watchdog: Watchdog):
        self.task = task
        self.is_chief = task.number == 0
        self.target: str = server.target
        self.config = config
        self.devices = task.devices(config.device_count.get("CPU", 1))
        self._server = server
        super().__init__(watchdog)

    def _leave(self) -> None:
        if self.is_chief:
            super()._leave()
        else:
            # The chief wants to save its work on the devices of this task.
            with StopSignal(self._say_that_it_serves):
                self._watchdog.serve()

    def _say_that_it_serves(self, number: int) -> None:
        names = self.task.names
        print(
            f"mtf_gradsync: {names[self.task.number]} got {signal.Signals(number).name} and "
            f"serves until {names[0]} has ended; a second signal ends it now",
            file=sys.stderr,
            flush=True,
        )

    def _may_be_a_loss(self, error: BaseException | None) -> bool:
        while error is not None:
            if isinstance(error, _LOSSES):
                return True
            error = error.__cause__
        return False


def join_cluster(
    cluster_spec: str | Mapping[str, Sequence[str]] | None = None,
    job_name: str | None = None,
    task_index: int | None = None,
    *,
    num_cpu_devices: int = 1,
    watch_port: int | None = None,
    timeout: float = 300.0,
    silence: float = 20.0,
) -> Cluster:
    """Starts this process's ``tf.train.Server``; returns when all tasks of the cluster are there.

    Call it in every task. Afterwards a thread watches over the tasks: when one dies, or says
    nothing for a while, all others end with an error that names it and
    `mtf_gradsync.LOST_PROCESS_EXIT_CODE`. TensorFlow itself would wait without end.

    Args:
      cluster_spec: addresses "host:port" of each job's tasks, a dictionary, JSON of one, or text
        like "worker=host1:2222,host2:2222"; None takes all three from the environment variable
        TF_CONFIG, as Estimator does.
      job_name: the job of this process.
      task_index: its number in the job.
      num_cpu_devices: how many CPU devices each task has; the same in all.
      watch_port: the port of the chief's machine at which the tasks meet and watch each other; None
        is the first one after the chief's own that no task of the cluster has.
      timeout: seconds to wait for the other tasks.
      silence: seconds without a sign of life after which a task is lost.

    Returns:
      A context manager; close it when the work is done.

    Raises:
      ValueError: when there is no cluster, or this task is none of it.
      ProcessesError: when the tasks cannot meet.
    """
    task = _task(cluster_spec, job_name, task_index)
    names = task.names
    chief_job, chief_index = task.all_tasks[0]
    config = session_config(
        num_cpu_devices=num_cpu_devices,
        collective_group_leader=f"/job:{chief_job}/task:{chief_index}",
    )
    port = task.free_port() if watch_port is None else watch_port
    if not 0 < port < 1 << 16:
        raise ValueError(f"watch_port must be a port, 1 to 65535; got {port}")
    me = Member.this(task.number, names[task.number])
    end = time.monotonic() + timeout
    try:
        server = tf.train.Server(task.jobs, task.job, task.index, config=config)
    except tf.errors.OpError as error:
        raise ProcessesError(
            f"{me} cannot serve on port {task.address[1]}, which the cluster gives it: "
            f"{error.message or type(error).__name__}. If this task does not run already, another "
            "program has the port; give the task another one, in all processes."
        ) from error
    facts = {
        "cluster": json.dumps(task.jobs),
        "num_cpu_devices": num_cpu_devices,
        "tensorflow": tf.__version__,
    }
    place = Place(task.chief_address[0], port, "watch_port")
    peers = meet(place, me, names, facts, end - time.monotonic())
    return Cluster(task, server, config, Watchdog(me, peers, silence))


def _task(
    cluster_spec: str | Mapping[str, Sequence[str]] | None,
    job_name: str | None,
    task_index: int | None,
) -> Task:
    given = {"cluster_spec": cluster_spec, "job_name": job_name, "task_index": task_index}
    missing = [name for name, value in given.items() if value is None]
    if cluster_spec is not None and job_name is not None and task_index is not None:
        return task_of_spec(cluster_spec, job_name, task_index)
    if len(missing) < len(given):
        raise ValueError(
            f"join_cluster got {', '.join(n for n in given if n not in missing)} without "
            f"{' and '.join(missing)}. Give all three, or none of them and TF_CONFIG."
        )
    task = task_of_environment()
    if task is None:
        raise ValueError(
            "join_cluster got no cluster, and the environment variable TF_CONFIG has none. Give "
            "cluster_spec, job_name and task_index."
        )
    return task
