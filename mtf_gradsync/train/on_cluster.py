"""Runs a training job on a mesh over the tasks of a ``tf.train.Server`` cluster."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.cluster import Task, join_cluster
from mtf_gradsync.mesh.text import mesh_text
from mtf_gradsync.processes.members import MissingProcessesError, ProcessesError
from mtf_gradsync.train.config.bindings import RunConfig
from mtf_gradsync.train.config.mesh import resolve_mesh
from mtf_gradsync.train.errors import ConfigError, TrainingError
from mtf_gradsync.train.run import NOTHING, Accepted, Part, run
from mtf_gradsync.train.runtime import choose_runtime


def run_on_cluster(
    config: RunConfig,
    model_dir: str,
    task: Task,
    *,
    watch_port: int | None = None,
    timeout: float = 300.0,
    silence: float = 20.0,
    say: Callable[[str], None] = print,
    accepted: Accepted = NOTHING,
    work: Callable[..., Any] = run,
) -> Any:
    """Trains and evaluates as `run` does, on the devices of all tasks. Every task calls it.

    The chief builds, trains, evaluates and writes: it calls `work` like `run` and returns its
    result. The others serve their devices until it ends, and return None. Without ``mesh_devices``
    all tasks have equally many CPU devices. The tasks meet by `mtf_gradsync.join_cluster`, with
    watch_port, timeout and silence (in seconds).

    Raises:
      ConfigError: if a setting cannot work.
      TrainingError: if training cannot go on, or the tasks do not fit together.
      MissingProcessesError: if tasks do not come.
    """
    choose_runtime(config, "grpc://localhost")  # an error on all tasks, before they meet
    config, num_cpu_devices = _with_devices(config, task)
    try:
        cluster = join_cluster(
            task.jobs,
            task.job,
            task.index,
            num_cpu_devices=num_cpu_devices,
            watch_port=watch_port,
            timeout=timeout,
            silence=silence,
        )
    except MissingProcessesError:
        raise
    except ProcessesError as error:
        raise TrainingError(str(error)) from error
    with cluster:
        if cluster.is_chief:
            return work(config, model_dir, say, accepted, Part(target=cluster.target))
        say(f"serves its devices until {task.names[0]} ends")
    return None


def _with_devices(config: RunConfig, task: Task) -> tuple[RunConfig, int]:
    """Returns the config with its mesh on the tasks' devices, and how many CPU devices each has."""
    tasks = task.all_tasks
    mesh = resolve_mesh(
        config.mesh_shape, config.layout_rules, config.mesh_devices, config.mesh_impl
    )
    if config.mesh_devices is not None:
        _check_devices(config.mesh_devices, tasks)
        return config, mesh.num_cpu_devices
    if mesh.shape.size % len(tasks):
        raise ConfigError(
            f'train.run.mesh_shape = "{mesh_text(mesh.shape)}" has {mesh.shape.size} processors, '
            f"which {len(tasks)} tasks cannot share evenly. Take a mesh whose size is a multiple "
            f"of {len(tasks)}, or say its devices by train.run.mesh_devices."
        )
    each = mesh.shape.size // len(tasks)
    return dataclasses.replace(config, mesh_devices=task.devices(each)), each


def _check_devices(devices: Sequence[str], tasks: Sequence[tuple[str, int]]) -> None:
    for device in devices:
        spec = tf.DeviceSpec.from_string(device)
        if (spec.job, spec.task) not in tasks:
            job, index = tasks[-1]
            raise ConfigError(
                f"train.run.mesh_devices names {device!r}, which is on no task of the cluster; "
                f'write it like "/job:{job}/task:{index}/device:CPU:0"'
            )
