"""Runs a training job on several processes: on their XLA devices, or on the tasks of a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from typing import Any, Callable, Iterator, Mapping

from mtf_gradsync.extension import mtf, tf
from mtf_gradsync.runtimes import xla
from mtf_gradsync.runtimes._common import ConfigError, TrainingError, mesh_text
from mtf_gradsync.runtimes.cluster import Task, join_cluster
from mtf_gradsync.runtimes.processes.members import MissingProcessesError, ProcessesError
from mtf_gradsync.runtimes.starting import Start
from mtf_gradsync.tools.train.config import RunConfig, check_positive, check_schedule
from mtf_gradsync.tools.train.errors import raised_as
from mtf_gradsync.tools.train.mesh_settings import resolve_mesh
from mtf_gradsync.tools.train.run import RunRole, run
from mtf_gradsync.tools.train.runner import choose_runtime

# Settings from which each process finds how many steps to make, and when all exchange values.
_SCHEDULE = ("train_steps", "save_checkpoints_steps", "log_steps", "timeline_steps")


def run_on_processes(
    config: RunConfig,
    model_dir: str,
    coordinator: str,
    num_processes: int,
    process_id: int,
    *,
    say: Callable[[str], None] = print,
    work: Callable[..., Any] = run,
    settings: Mapping[str, int] | None = None,
    first_does: str = "",
    **meeting: float,
) -> Any:
    """Trains and evaluates as `run` does, on all processes' XLA devices. Every process calls it.

    All processes build the graph and make the training steps. Process 0 evaluates, and writes to
    model_dir, which the other processes have to be able to read. The processes first meet by
    `mtf_gradsync.xla.start_processes`. Training does not begin unless all processes have the same
    schedule and the same `settings`.

    Args:
      config: the settings of the run.
      model_dir: the directory of the run.
      coordinator: the address at which the processes meet, such as "first.example:29400".
      num_processes: how many processes there are.
      process_id: the number of this process, from 0.
      say: called with each line of text for the user.
      work: the function that each process calls once all have met, with arguments of `run`:
        config, model_dir, say and role.
      settings: numbers by name, such as {"--steps": 10}, which have to be the same in all
        processes; None for none.
      first_does: what process 0 does alone, in words, for a line that the other processes print; ""
        stands for "evaluates, and writes to" the directory.
      **meeting: the arguments timeout and silence of `start_processes`, in seconds. Silence is the
        time without a heartbeat after which a process counts as lost.

    Returns:
      What `work` returns in this process.

    Raises:
      ConfigError: if a setting cannot work.
      TrainingError: if training cannot go on, or the processes do not fit together.
      MissingProcessesError: if some of the processes do not start in time.
    """
    if config.runtime == "fastest":
        config = dataclasses.replace(config, runtime="xla")
    if choose_runtime(config).name != "xla":
        raise ConfigError(
            f'train.run.runtime = "{config.runtime}" does not run on XLA devices of several '
            'processes (--coordinator); "xla" does'
        )
    shape = resolve_mesh(config.mesh_shape, config.layout_rules, None).shape
    each = _share_of_each(shape, num_processes, "processes")
    check_schedule(config)
    check_positive("train_steps", config.train_steps)
    schedule = {f"train.run.{name}": int(getattr(config, name)) for name in _SCHEDULE}
    with raised_as(ConfigError, ValueError), _errors_of_meeting():
        with xla.start_processes(
            coordinator,
            num_processes,
            process_id,
            cpu_devices=each,
            **meeting,
            settings={**schedule, **(settings or {})},
        ) as processes:
            role = RunRole(choose_start=lambda choose: _choose_on_all_processes(processes, choose))
            if process_id == 0:
                return work(config, model_dir, say, role=role)
            say(f"process 0 {first_does or f'evaluates, and writes to {model_dir}'}")
            role = role._replace(checkpoint_dir=model_dir)
            config = dataclasses.replace(config, eval_dataset_fn=None)
            # Process 0 writes the same files to model_dir; those of this process are deleted.
            with tempfile.TemporaryDirectory() as own:
                return work(config, own, lambda line: None, role=role)


def _choose_on_all_processes(processes: xla.Processes, choose: Callable[[], Start]) -> Start:
    """Calls `choose`, a function that chooses a checkpoint, and returns its result.

    All processes call this function. `choose` is called by process 0 first, then by the other
    processes. Raises ProcessesError if processes have chosen checkpoints of different steps.
    """
    start = processes.in_turn(choose)
    processes.check_equal(
        "the step of the newest checkpoint in model_dir",
        str(start.step),
        "Give all processes the same directory, on a disk that they share.",
    )
    return start


def run_on_cluster(
    config: RunConfig,
    model_dir: str,
    task: Task,
    *,
    say: Callable[[str], None] = print,
    work: Callable[..., Any] = run,
    **meeting: Any,
) -> Any:
    """Trains and evaluates as `run` does, on the devices of all tasks. Every task calls it.

    The chief builds the graph, trains, evaluates and writes the files. The other tasks serve their
    devices until the chief ends. If the config does not bind ``mesh_devices``, all tasks have
    equally many CPU devices. The tasks first meet by `mtf_gradsync.join_cluster`.

    Args:
      config: the settings of the run.
      model_dir: the directory of the run.
      task: the tasks of the cluster, and which of them this process is.
      say: called with each line of text for the user.
      work: the function that the chief calls, with arguments of `run`: config, model_dir, say and
        role.
      **meeting: the arguments watch_port, timeout, silence and open_to_network of `join_cluster`.
        Timeout and silence are in seconds; silence is the time without a heartbeat after which a
        task counts as lost.

    Returns:
      What `work` returns, in the chief; None in the other tasks.

    Raises:
      ConfigError: if a setting cannot work.
      TrainingError: if training cannot go on, or the tasks do not fit together.
      MissingProcessesError: if some of the tasks do not start in time.
    """
    choose_runtime(config, "grpc://localhost")  # an error on all tasks, before they meet
    config, num_cpu_devices = _with_cluster_devices(config, task)
    with _errors_of_meeting():
        cluster = join_cluster(
            task.jobs, task.job, task.index, num_cpu_devices=num_cpu_devices, **meeting
        )
    with cluster:
        if cluster.is_chief:
            return work(config, model_dir, say, role=RunRole(target=cluster.target))
        say(f"serves its devices until {task.names[0]} ends")
    return None


def _with_cluster_devices(config: RunConfig, task: Task) -> tuple[RunConfig, int]:
    """Returns `config` with the devices of its mesh, and how many CPU devices each task needs.

    The devices are those of all tasks in the cluster of `task`. If the config names devices, it
    keeps these. Raises ConfigError if the tasks cannot hold the mesh.
    """
    tasks = task.all_tasks
    mesh = resolve_mesh(
        config.mesh_shape, config.layout_rules, config.mesh_devices, config.mesh_impl
    )
    for device in config.mesh_devices or ():
        spec = tf.DeviceSpec.from_string(device)
        if (spec.job, spec.task) not in tasks:
            job, index = tasks[-1]
            raise ConfigError(
                f"train.run.mesh_devices names {device!r}, which is on no task of the cluster; "
                f'write it like "/job:{job}/task:{index}/device:CPU:0"'
            )
    if config.mesh_devices is not None:
        return config, mesh.num_cpu_devices
    devices = ", or name its devices by train.run.mesh_devices"
    each = _share_of_each(mesh.shape, len(tasks), "tasks", devices)
    return dataclasses.replace(config, mesh_devices=task.devices(each)), each


def _share_of_each(shape: mtf.Shape, number: int, who: str, remedy: str = "") -> int:
    """Returns how many of a mesh's processors each of `number` tasks or processes has.

    Raises ConfigError if they cannot share the mesh evenly. Its text says `who` cannot, "tasks" or
    "processes", and ends with one more `remedy`.
    """
    each, left = divmod(shape.size, number)
    if left:
        raise ConfigError(
            f'train.run.mesh_shape = "{mesh_text(shape)}" has {shape.size} processors, which '
            f"{number} {who} cannot share evenly. Take a mesh whose size is a multiple of "
            f"{number}{remedy}."
        )
    return each


@contextlib.contextmanager
def _errors_of_meeting() -> Iterator[None]:
    """Turns a ProcessesError of the block into a TrainingError, except a MissingProcessesError."""
    try:
        yield
    except MissingProcessesError:
        raise
    except ProcessesError as error:
        raise TrainingError(str(error)) from error
