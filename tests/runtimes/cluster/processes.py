"""Starts programs as processes of their own, with a time limit, and leaves none behind.

They are forked, which is as good as ``python -m <module> <arguments>`` and sooner ready; a member
of a cluster gets ``<cluster spec as JSON> <job> <task>`` before the other arguments.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from typing import Any

from benchmarks.cluster import free_ports
from tests.forked import TIME_LIMIT, Forked

ROOT = pathlib.Path(__file__).resolve().parents[3]


def cluster_spec(jobs: dict[str, int]) -> dict[str, list[str]]:
    """Addresses on loopback for the tasks of each job.

    Args:
      jobs: how many tasks each job has.

    Returns:
      What ``tf.train.ClusterSpec`` takes.
    """
    ports = iter(free_ports(sum(jobs.values())))
    return {job: [f"127.0.0.1:{next(ports)}" for _ in range(n)] for job, n in jobs.items()}


class Processes:
    """Programs that end together, at the latest when the ``with`` block does."""

    def __init__(self, time_limit: float = TIME_LIMIT):
        """Sets the time that all waiting together may take, in seconds from now."""
        self._end = time.monotonic() + time_limit
        self.started: dict[Forked, str] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: Any) -> None:
        for process in self.started:
            process.kill()

    def fork(self, *command: Any) -> Forked:
        """Starts a program from a process that has TensorFlow; see `Forked`."""
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
        process = Forked(command, ROOT, environment)
        self.started[process] = " ".join(map(str, command[:2] + command[2:][-3:]))
        return process

    def start_cluster(
        self, module: str, jobs: dict[str, int], *arguments: Any
    ) -> dict[tuple[str, int], Forked]:
        """Forks a module once for each task of a cluster on loopback.

        Args:
          module: the program.
          jobs: how many tasks each job has.
          *arguments: for each program, after the cluster spec (JSON), its job and its task.

        Returns:
          The processes by job and task.
        """
        spec = json.dumps(cluster_spec(jobs))
        return {
            (job, task): self.fork("-m", module, spec, job, task, *arguments)
            for job, number in jobs.items()
            for task in range(number)
        }

    def wait(self, process: Forked) -> str:
        """Waits until a program has ended well, while no other one fails.

        Returns:
          What it printed.

        Raises:
          RuntimeError: with the outputs, if it or another one ended badly.
          TimeoutError: with the outputs, if the time is up.
        """
        while process.poll() is None:
            if any(other.poll() for other in self.started):
                break
            if time.monotonic() > self._end:
                raise TimeoutError(f"No end of {self.started[process]} in time.\n{self._outputs()}")
            time.sleep(0.05)
        failed = [name for other, name in self.started.items() if other.poll()]
        if failed:
            raise RuntimeError(f"Ended with an error: {', '.join(failed)}\n{self._outputs()}")
        return process.output()

    def wait_for(self, process: Forked, text: str) -> None:
        """Waits until a program has printed a text.

        Raises:
          RuntimeError: with the outputs, if the program ended without it.
          TimeoutError: with the outputs, if the time is up.
        """
        while text not in process.output():
            if process.poll() is not None and text not in process.output():
                raise RuntimeError(
                    f"{self.started[process]} never said {text!r}.\n{self._outputs()}"
                )
            if time.monotonic() > self._end:
                raise TimeoutError(
                    f"{self.started[process]} did not say {text!r}.\n{self._outputs()}"
                )
            time.sleep(0.05)

    def _outputs(self) -> str:
        return "\n".join(
            f"--- {name}\n{p.output()}{p.errors()}" for p, name in self.started.items()
        )


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that has ended and whom nobody has asked yet (in a container perhaps nobody will).
    with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def ended(numbers):
    end = time.monotonic() + 60
    while any(runs(pid) for pid in numbers) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(runs(pid) for pid in numbers)
