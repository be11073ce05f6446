"""The tasks of a cluster, and which task this process is."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from typing import Any, Mapping, NamedTuple, Sequence

from mtf_gradsync.extension import tf
from mtf_gradsync.runtimes._private.tensorflow import bind_to_loopback
from mtf_gradsync.runtimes._signals import StopSignal
from mtf_gradsync.runtimes.processes.meeting import MeetingAddress, meet
from mtf_gradsync.runtimes.processes.members import Member, ProcessesError, all_given
from mtf_gradsync.runtimes.processes.watchdog import Membership, Watchdog
from mtf_gradsync.runtimes.settings import session_config

_logger = logging.getLogger(__name__)

# The first of these that a cluster has is the chief's job.
_CHIEF_JOBS = ("chief", "master", "worker")
_ORDER = (*_CHIEF_JOBS, "ps")
_EXAMPLE = '"worker=host1:2222,host2:2222" or {"worker": ["host1:2222", "host2:2222"]}'


class Task(NamedTuple):
    """A task of a cluster.

    `job` is the name of the task's job, and `index` the task's number in the job. `jobs` has the
    addresses "host:port" of all tasks, by job: first the chief's job, then workers, parameter
    servers, and other jobs by name.
    """

    jobs: dict[str, list[str]]
    job: str
    index: int  # type: ignore[assignment]  # in place of the method of tuples, which none calls

    @property
    def all_tasks(self) -> list[tuple[str, int]]:
        """The job and number of each task, the chief first."""
        return [(job, index) for job, tasks in self.jobs.items() for index in range(len(tasks))]

    @property
    def names(self) -> list[str]:
        """The names of all tasks, the chief's first: "worker 0" and so on."""
        return [f"{job} {index}" for job, index in self.all_tasks]

    @property
    def number(self) -> int:
        """The index of this task in `all_tasks`; 0 is the chief."""
        return self.all_tasks.index((self.job, self.index))

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The host and port of each task, the chief's first."""
        return [_host_and_port(x, job) for job, tasks in self.jobs.items() for x in tasks]

    @property
    def port(self) -> int:
        """The port of this task."""
        return self.addresses[self.number][1]

    def devices(self, each: int) -> list[str]:
        """Returns the device strings of all CPU devices, task by task, `each` devices per task."""
        return [
            f"/job:{job}/task:{index}/device:CPU:{device}"
            for job, index in self.all_tasks
            for device in range(each)
        ]

    def free_port(self) -> int:
        """Returns the first port number after the chief's that is no task's port.

        Raises ValueError if no such port number is left.
        """
        taken = [port for _, port in self.addresses]
        port = next((p for p in range(taken[0] + 1, 1 << 16) if p not in taken), None)
        if port is None:
            raise ValueError(
                f"No port after the chief's, {taken[0]}, is left to meet at: give watch_port."
            )
        return port


def task_of_spec(
    cluster_spec: str | Mapping[str, Sequence[str]], job_name: str, task_index: int
) -> Task:
    """Returns the task of a cluster that this process is, or raises a ValueError if it is none.

    `cluster_spec` has the addresses "host:port" of each job's tasks. `cluster_spec` is a dictionary
    from job to addresses, the JSON text of this dictionary, or text like
    "worker=host1:2222,host2:2222" with ";" between jobs. `job_name` is the job of this process, and
    `task_index` is the number of this process in its job, from 0.
    """
    spec = _parsed(cluster_spec) if isinstance(cluster_spec, str) else cluster_spec
    if not isinstance(spec, Mapping) or not spec:
        raise ValueError(f"A cluster must be like {_EXAMPLE}; got {cluster_spec!r}.")
    jobs = {job: spec[job] for job in sorted(spec, key=_place)}
    addresses = set()
    for job, tasks in jobs.items():
        if isinstance(tasks, str) or not isinstance(tasks, Sequence) or not tasks:
            raise ValueError(
                f"The job {job!r} of a cluster must list addresses, like {_EXAMPLE}; got {tasks!r}."
            )
        for address in tasks:
            _host_and_port(address, job)
            if address in addresses:
                raise ValueError(f"Two tasks of the cluster have the same address {address!r}.")
            addresses.add(address)
    chief = next(iter(jobs))
    if chief not in _CHIEF_JOBS:
        raise ValueError(
            f'A cluster must have a job "chief" or "worker", whose first task is the chief; got '
            f"the jobs {', '.join(jobs)}."
        )
    if chief != "worker" and len(jobs[chief]) > 1:
        raise ValueError(f"A cluster has one {chief}; got {len(jobs[chief])}: {jobs[chief]}.")
    if job_name not in jobs:
        raise ValueError(
            f"The cluster has the jobs {', '.join(jobs)}, and not {job_name!r}"
            + (": the chief evaluates." if job_name == "evaluator" else ".")
        )
    if not isinstance(task_index, int) or not 0 <= task_index < len(jobs[job_name]):
        raise ValueError(
            f"The job {job_name!r} has the tasks 0 to {len(jobs[job_name]) - 1}; got "
            f"{task_index!r}."
        )
    return Task({job: list(tasks) for job, tasks in jobs.items()}, job_name, task_index)


def task_of_environment() -> Task | None:
    """Returns the task that the environment variable TF_CONFIG describes, as Estimator reads it.

    The result is None if the environment variable TF_CONFIG describes no cluster. Raises ValueError
    for a cluster that `task_of_spec` refuses.
    """
    text = os.environ.get("TF_CONFIG") or "{}"
    try:
        content = json.loads(text)
        spec, task = content.get("cluster"), content.get("task") or {}
        if not spec:
            return None
        job, index = task.get("type"), task.get("index", 0)
        if not isinstance(job, (str, type(None))):
            raise ValueError(f"The type of the task must be text; got {job!r}.")
    except (ValueError, AttributeError) as error:
        raise ValueError(
            'TF_CONFIG must be like {"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": '
            f'{{"type": "worker", "index": 0}}}}; got {text!r}.'
        ) from error
    try:
        number = int(index) if str(index).isdigit() else index
        # If the type is missing, the error names the jobs of the cluster.
        return task_of_spec(spec, job, number)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"TF_CONFIG: {error}") from error


def _parsed(text: str) -> Any:
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(
                f"A cluster must be like {_EXAMPLE}; got {text!r} ({error})."
            ) from error
    spec = {}
    for part in filter(None, text.split(";")):
        job, sign, tasks = part.partition("=")
        if not sign or job.strip() in spec:
            raise ValueError(f"A cluster must be like {_EXAMPLE}; got {text!r}.")
        spec[job.strip()] = [address.strip() for address in tasks.split(",") if address.strip()]
    return spec


def _place(job: str) -> tuple[int, str]:
    return (_ORDER.index(job) if job in _ORDER else len(_ORDER), job)


def _host_and_port(address: Any, job: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f'Addresses of a cluster must be like "host:2222"; the job {job!r} has {address!r}.'
        )
    return host.strip("[]"), int(port)


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
    """A process as a task of a cluster. Use it as a context manager around all work on the mesh.

    The chief works inside its context. Any other task that reaches the end of its own context still
    runs the operations that the chief places on the task's devices. The task ends when the chief
    reaches the end of the chief's context. An exception that leaves the context of one task ends
    the other tasks with an error that quotes the exception.

    Attributes:
      task: the task that this process is.
      is_chief: whether this task builds the graph and runs the session: task 0 of the job "chief",
        or of "worker" if there is no chief.
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

    def _may_be_caused_by_loss(self, error: BaseException | None) -> bool:
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
    open_to_network: bool = False,
) -> Cluster:
    """Starts this process's ``tf.train.Server``; returns when all tasks have started.

    Call this function in every task. Afterwards a thread in each task watches over all tasks. A
    task counts as lost when it dies, or sends no heartbeat for `silence` seconds. Then all other
    tasks end with an error that names the lost task, and with the exit code
    `mtf_gradsync.LOST_PROCESS_EXIT_CODE`. TensorFlow itself would wait for the lost task for ever.

    Args:
      cluster_spec: addresses "host:port" of each job's tasks: a dictionary from job to addresses,
        the JSON text of this dictionary, or text like "worker=host1:2222,host2:2222". If
        cluster_spec, job_name and task_index are None, all three come from the environment variable
        TF_CONFIG, as Estimator reads it.
      job_name: the job of this process.
      task_index: the number of this process in its job.
      num_cpu_devices: how many CPU devices each task has; all tasks have to give the same number.
      watch_port: the port of the chief's machine at which the tasks meet and watch each other; None
        for the first port number after the chief's that no task of the cluster has.
      timeout: seconds to wait for the other tasks.
      silence: seconds without a heartbeat after which a task counts as lost.
      open_to_network: whether other machines may call the server, which obeys anybody who can reach
        it. If it is False, a cluster on loopback addresses keeps other machines out. On systems
        that cannot keep them out (only Linux can), such a cluster does not start. A cluster on
        other addresses only logs a warning.

    Returns:
      A `Cluster`, a context manager that is to be closed when the work on the mesh is done.

    Raises:
      ValueError: when no cluster is given, or this process is no task of the cluster.
      ProcessesError: when the tasks cannot meet, or other machines cannot be kept out.
    """
    given: dict[str, Any] = {
        "cluster_spec": cluster_spec, "job_name": job_name, "task_index": task_index
    }  # fmt: skip
    if all_given("join_cluster", "and TF_CONFIG", **given):
        task: Task | None = task_of_spec(*given.values())
    else:
        task = task_of_environment()
    if task is None:
        raise ValueError(
            "join_cluster got no cluster, and the environment variable TF_CONFIG has none. Give "
            "cluster_spec, job_name and task_index."
        )
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
        server = tf.train.Server(task.jobs, task.job, task.index, config=config, start=False)
    except tf.errors.OpError as error:
        raise ProcessesError(
            f"{me} cannot serve on port {task.port}, which the cluster gives it: "
            f"{error.message or type(error).__name__}. If this task does not run already, another "
            "program has the port; give the task another port, in all processes."
        ) from error
    if not open_to_network:
        _keep_others_out(me, task)
    server.start()
    facts = {
        "cluster": json.dumps(task.jobs),
        "num_cpu_devices": num_cpu_devices,
        "tensorflow": tf.__version__,
    }
    place = MeetingAddress(task.addresses[0][0], port, "watch_port")
    peers = meet(place, me, names, facts, end - time.monotonic())
    return Cluster(task, server, config, Watchdog(me, peers, silence))


def _keep_others_out(me: Member, task: Task) -> None:
    """Closes a server's port to other machines, if all tasks of the cluster are on this machine.

    This function has to be called before the server starts. `task` says which task this process is,
    and `me` names this process in messages. If the cluster has tasks on other machines, the port
    stays open and a warning is logged. Raises ProcessesError if the system cannot close the port to
    other machines.
    """
    what = (
        "TensorFlow's server listens on all addresses of this machine, and whoever reaches port "
        f"{task.port} can run any operation in this process, which may read and write its "
        "files"
    )
    if not all(MeetingAddress(*address, "cluster_spec").loopback for address in task.addresses):
        _logger.warning(
            "%s: %s. Let no machine but those of the cluster reach this port.", me, what
        )
        return
    try:
        bind_to_loopback(task.port)
    except OSError as error:
        raise ProcessesError(
            f"{me}: {what}. The cluster's addresses are all of this machine, but other machines "
            f"cannot be kept out on this system: {error.strerror or error}. Start the cluster "
            "inside a network that you trust (a container, a network namespace) and say so: "
            "open_to_network=True (--open_to_network)."
        ) from error
