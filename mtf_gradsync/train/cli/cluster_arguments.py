"""The arguments that make a run one of several processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mtf_gradsync.train.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from mtf_gradsync.cluster import Task

_TASK = ("cluster_spec", "job_name", "task_index")


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what says which processes there are, and which this one is."""
    group = parser.add_argument_group(
        "several processes",
        "A placement mesh over tf.train.Servers: give --cluster_spec, --job_name and --task_index "
        "to each, or TF_CONFIG in its environment.",
    )
    group.add_argument(
        "--cluster_spec",
        metavar="SPEC",
        help='all tasks, like worker=host1:2222,host2:2222 or {"worker": ["host1:2222", ...]}',
    )
    group.add_argument("--job_name", metavar="JOB", help="the job of this task: chief, worker, ps")
    group.add_argument("--task_index", type=int, metavar="N", help="its number in the job, from 0")
    group.add_argument(
        "--watch_port",
        type=int,
        metavar="PORT",
        help="where the tasks meet on the chief's machine (default: the first port after the "
        "chief's that no task has)",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long to wait for the others at the start (default: 300)",
    )
    group.add_argument(
        "--silence",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="without a sign of life for this long a process is lost (default: 20)",
    )


def given_task(args: argparse.Namespace) -> Task | None:
    """The task that this process is, by the flags, or TF_CONFIG where they are absent.

    Returns:
      The task; None for a run in one process.

    Raises:
      ConfigError: if they describe none.
    """
    from mtf_gradsync.cluster import task_of_environment, task_of_spec

    values = {name: getattr(args, name) for name in _TASK}
    missing = [f"--{name}" for name, value in values.items() if value is None]
    try:
        if not missing:
            task, source = task_of_spec(**values), "--cluster_spec"
        elif len(missing) < len(values):
            given = [f"--{name}" for name, value in values.items() if value is not None]
            raise ConfigError(
                f"{', '.join(given)} without {' and '.join(missing)}; give all three, or TF_CONFIG"
            )
        else:
            task, source = task_of_environment(), "TF_CONFIG"
            # So it is set for jobs of one process, too.
            if task is None or len(task.names) == 1:
                return None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--cluster_spec: {error}" if not missing else str(error)) from error
    print(f"{task.names[task.number]} of the {len(task.names)} tasks of a cluster ({source})")
    return task


def meeting_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """How the processes meet and watch each other, by the names of `join_cluster`."""
    return {"watch_port": args.watch_port, "timeout": args.timeout, "silence": args.silence}
