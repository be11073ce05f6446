"""The flags by which a command is one of several processes, and runs its work on all."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.tools.train.cli.flags import add_number, whole_number

if TYPE_CHECKING:
    from mtf_gradsync.runtimes.cluster import Task
    from mtf_gradsync.tools.train.config import RunConfig

_TASK = ("cluster_spec", "job_name", "task_index")
_PROCESS = ("coordinator", "num_processes", "process_id")


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name all processes of a run, and which of them this one is."""
    group = parser.add_argument_group(
        "several processes",
        "A placement mesh over tf.train.Servers: give --cluster_spec, --job_name and\n"
        "--task_index to each, or TF_CONFIG in its environment. XLA devices of several\n"
        "processes: give --coordinator, --num_processes and --process_id to each.",
    )
    group.add_argument(
        "--cluster_spec",
        metavar="SPEC",
        help='all tasks, like worker=host1:2222,host2:2222 or {"worker": ["host1:2222", ...]}',
    )
    group.add_argument("--job_name", metavar="JOB", help="the job of this task: chief, worker, ps")
    index = "the number of this task in its job, from 0"
    add_number(group, "--task_index", "N", index, kind=whole_number(0))
    group.add_argument(
        "--watch_port",
        type=whole_number(1, 1 << 16),
        metavar="PORT",
        help="where the tasks meet on the chief's machine (default: the first port after the "
        "chief's that no task has)",
    )
    group.add_argument(
        "--open_to_network",
        action="store_true",
        help="let TensorFlow's server, which obeys anybody, be called by other machines although "
        "all of the cluster's addresses are of this machine",
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of process 0, with any free port of its machine",
    )
    number, own = "how many processes there are", "the number of this process, from 0"
    add_number(group, "--num_processes", "N", number, kind=whole_number())
    add_number(group, "--process_id", "N", own, kind=whole_number(0))
    timeout = "how long to wait for the other processes at the start"
    add_number(group, "--timeout", "SECONDS", timeout, 300.0)
    silence = "a process that sends no heartbeat for this long counts as lost"
    add_number(group, "--silence", "SECONDS", silence, 20.0)


def is_alone(args: argparse.Namespace) -> bool:
    """Returns whether a run has one process: neither flags nor TF_CONFIG name several."""
    flags = any(getattr(args, name) is not None for name in (*_TASK, *_PROCESS))
    return not flags and not os.environ.get("TF_CONFIG")


def run_by_flags(
    args: argparse.Namespace,
    config: RunConfig,
    model_dir: str | None,
    work: Callable[..., Any],
    settings: Mapping[str, int] | None = None,
    first_does: str = "",
) -> Any:
    """Runs `work` in this process alone, or together with the other processes of the run.

    The parsed flags, or TF_CONFIG, say whether the run has several processes, and which of them
    this process is. If the run has several processes, each of them calls `run_by_flags`.

    Args:
      args: the parsed flags of the command.
      config: the settings of the run, which gin has bound.
      model_dir: the directory of the run. It may be None only if the run has a single process.
      work: a function of config and model_dir, and of say and role as `run` has them. It is `run`
        itself, or it does other work on all processes, such as recording a timeline.
      settings: numbers by name, such as {"--steps": 10}, which have to be the same in all processes
        with XLA devices. None for no such numbers.
      first_does: what process 0 does and the other processes with XLA devices do not, in words for
        the user; "" if process 0 evaluates and writes to model_dir.

    Returns:
      The result of `work`. The result is None in a task of a cluster that only serves its devices
      to the chief.
    """
    # Imported here because it takes seconds, which `--help` need not wait for.
    from mtf_gradsync.tools.train.distributed_run import run_on_cluster, run_on_processes

    process = _process_of_flags(args)
    task = None if process else _task_of_flags(args)
    if not (process or task):
        return work(config, model_dir)
    assert model_dir is not None
    given: dict[str, Any] = {"work": work, "timeout": args.timeout, "silence": args.silence}
    if process:
        return run_on_processes(
            config, model_dir, **process, **given, settings=settings, first_does=first_does
        )
    assert task is not None
    given.update(watch_port=args.watch_port, open_to_network=args.open_to_network)
    return run_on_cluster(config, model_dir, task, **given)


def _task_of_flags(args: argparse.Namespace) -> Task | None:
    """Returns this process's task in a cluster, from the flags, or else from TF_CONFIG.

    The result is None if neither the flags nor TF_CONFIG name a cluster of several tasks.
    """
    from mtf_gradsync.runtimes.cluster import task_of_environment, task_of_spec

    values = _all_or_none(args, _TASK)
    task: Task | None
    try:
        if values:
            task, source = task_of_spec(**values), "--cluster_spec"
        else:
            task, source = task_of_environment(), "TF_CONFIG"
            # Some set TF_CONFIG for a run of one process, too.
            if task is None or len(task.names) == 1:
                return None
    except ValueError as error:
        raise ConfigError(f"--cluster_spec: {error}" if values else str(error)) from error
    print(f"{task.names[task.number]} of the {len(task.names)} tasks of a cluster ({source})")
    return task


def _process_of_flags(args: argparse.Namespace) -> dict[str, Any] | None:
    """Returns the values of --coordinator, --num_processes and --process_id, by name.

    The three flags make this process one of several with XLA devices. The result is None if none of
    these flags is given. Raises ConfigError if the flags' values do not fit together, or if flags
    of a cluster are given, too.
    """
    values = _all_or_none(args, _PROCESS)
    if values is None:
        return None
    if any(getattr(args, name) is not None for name in _TASK):
        raise ConfigError(
            f"--coordinator={args.coordinator} is for XLA devices, --cluster_spec for a placement "
            "mesh: give one of the two"
        )
    if not 0 <= values["process_id"] < values["num_processes"]:
        raise ConfigError(
            f"--process_id must be between 0 and {values['num_processes'] - 1}; got "
            f"{values['process_id']}"
        )
    return values


def _all_or_none(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any] | None:
    values = {name: getattr(args, name) for name in names}
    given = [f"--{name}" for name, value in values.items() if value is not None]
    missing = [f"--{name}" for name, value in values.items() if value is None]
    if given and missing:
        raise ConfigError(f"{', '.join(given)} without {' and '.join(missing)}: give all three")
    return values if given else None
