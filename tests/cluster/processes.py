"""Starts programs as processes of their own, with a time limit, and leaves none behind.

A program is a module. It is started as ``python -m <module> <arguments>``; a member of a cluster
gets ``<cluster spec as JSON> <job> <task>`` before the other arguments.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.cluster import free_ports

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Bounds a hang; far above what a test takes on a machine that is busy with other things.
TIME_LIMIT = 900.0


def cluster_spec(jobs: dict[str, int]) -> dict[str, list[str]]:
    """Addresses on loopback for the tasks of each job.

    Args:
      jobs: how many tasks each job has.

    Returns:
      What ``tf.train.ClusterSpec`` takes.
    """
    ports = iter(free_ports(sum(jobs.values())))
    return {job: [f"127.0.0.1:{next(ports)}" for _ in range(n)] for job, n in jobs.items()}


class Process:
    """A program that runs in a process group of its own."""

    def __init__(self, module: str, arguments: list[str]):
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # A file and not a pipe: nobody has to read for the program to go on.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self.name = " ".join([module, *arguments[-3:]])
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.end_with_parent", module, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"},
            # Never written to: its end tells the program that the parent is gone.
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def output(self) -> str:
        """What the program has printed, errors included."""
        descriptor = self._output.fileno()
        # At an offset of its own: the programs write at theirs.
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode("utf-8", "replace")

    def kill(self) -> None:
        """Ends the program and whatever it started, and waits for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        if self.popen.stdin:
            self.popen.stdin.close()


class Processes:
    """Programs that end together, at the latest when the ``with`` block does."""

    def __init__(self, time_limit: float = TIME_LIMIT):
        """Sets the time that all waiting together may take, in seconds from now."""
        self._end = time.monotonic() + time_limit
        self.started: list[Process] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: Any) -> None:
        for process in self.started:
            process.kill()

    def start(self, module: str, *arguments: Any) -> Process:
        """Starts a module as a program."""
        process = Process(module, [str(argument) for argument in arguments])
        self.started.append(process)
        return process

    def start_cluster(
        self, module: str, jobs: dict[str, int], *arguments: Any
    ) -> dict[tuple[str, int], Process]:
        """Starts a module once for each task of a cluster on loopback.

        Args:
          module: the program.
          jobs: how many tasks each job has.
          *arguments: for each program, after the cluster spec (JSON), its job and its task.

        Returns:
          The processes by job and task.
        """
        spec = json.dumps(cluster_spec(jobs))
        return {
            (job, task): self.start(module, spec, job, task, *arguments)
            for job, number in jobs.items()
            for task in range(number)
        }

    def wait(self, process: Process) -> str:
        """Waits until a program has ended well, while no other one fails.

        Returns:
          What it printed.

        Raises:
          RuntimeError: with the outputs, if it or another one ended badly.
          TimeoutError: with the outputs, if the time is up.
        """
        while process.popen.poll() is None:
            if any(other.popen.poll() for other in self.started):
                break
            if time.monotonic() > self._end:
                raise TimeoutError(f"No end of {process.name} in time.\n{self._outputs()}")
            time.sleep(0.05)
        failed = [other.name for other in self.started if other.popen.poll()]
        if failed:
            raise RuntimeError(f"Ended with an error: {', '.join(failed)}\n{self._outputs()}")
        return process.output()

    def wait_for(self, process: Process, text: str) -> None:
        """Waits until a program has printed a text.

        Raises:
          RuntimeError: with the outputs, if the program ended without it.
          TimeoutError: with the outputs, if the time is up.
        """
        while text not in process.output():
            if process.popen.poll() is not None and text not in process.output():
                raise RuntimeError(f"{process.name} never said {text!r}.\n{self._outputs()}")
            if time.monotonic() > self._end:
                raise TimeoutError(f"{process.name} did not say {text!r}.\n{self._outputs()}")
            time.sleep(0.05)

    def _outputs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.output()}" for p in self.started)
