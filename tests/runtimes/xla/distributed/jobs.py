"""Starts jobs of several processes for the tests, and leaves none of them behind."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time

import numpy as np

from benchmarks.cluster import free_ports
from tests.forked import TIME_LIMIT
from tests.runtimes.cluster.processes import Processes

# Steps of a timeline, where a job records one.
RECORDED = 4
_PORT_TAKEN = "cannot listen on port"


class Member:
    """A process of a job."""

    def __init__(self, folder, name):
        self._folder, self._name = folder, name

    def output(self):
        path = self._folder / f"{self._name}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def pid(self):
        return int((self._folder / f"{self._name}.pid").read_text())

    @property
    def code(self):
        """What it ended with; None while it runs."""
        path = self._folder / f"{self._name}.code"
        return int(path.read_text()) if path.exists() else None

    def send(self, number):
        os.kill(self.pid, number)


class Job:
    """All processes of a job."""

    def __init__(self, folder, members, end):
        self.folder, self.members, self._end = folder, members, end

    def wait_for(self, text, who=None):
        """Waits until members have printed a text."""
        who = self.members if who is None else who
        while not all(text in m.output() for m in who):
            if any(m.code is not None and text not in m.output() for m in who):
                raise RuntimeError(f"Never said {text!r}.\n{self.outputs()}")
            self._wait(text)

    def wait_for_start(self):
        """Waits until it is clear whether process 0 has got its port."""
        first = self.members[0]
        while "started" not in first.output() and first.code is None:
            self._wait("the start")

    def codes(self, who=None):
        """Waits for the end of members; returns what they ended with."""
        who = self.members if who is None else who
        while any(m.code is None for m in who):
            self._wait("an end")
        return [m.code for m in who]

    def outputs(self):
        return "\n".join(f"--- {i}\n{m.output()}" for i, m in enumerate(self.members))

    def _wait(self, what):
        if time.monotonic() > self._end:
            raise TimeoutError(f"Waited for {what}.\n{self.outputs()}")
        time.sleep(0.02)


class Jobs:
    """Where jobs are started. They end with it."""

    def __init__(self, folder):
        self._folder = pathlib.Path(folder)
        self._plans = self._folder / "plans"
        self._plans.mkdir()
        self._processes = Processes()
        self._count = 0

    def __enter__(self):
        self._processes.fork("-m", "tests.runtimes.xla.distributed.forked", self._plans)
        return self

    def __exit__(self, *exception):
        # By their process group, to which all jobs belong.
        self._processes.__exit__(*exception)

    def start(self, count, folder=None, **plan):
        """Starts a job of some processes, each of which makes its part of the devices."""
        end = time.monotonic() + TIME_LIMIT
        if folder is None:
            folder = self._folder / f"job_{self._count}"
            folder.mkdir()
        while True:
            job = self._start_once(count, folder, plan, end)
            if count > 1:
                job.wait_for_start()
            # Another program may have taken the port in between.
            if _PORT_TAKEN not in job.members[0].output():
                return job
            for member in job.members[1:]:
                member.send(signal.SIGKILL)
            job.codes()

    def run(self, count, folder=None, **plan):
        """Runs a job to its good end."""
        job = self.start(count, folder, **plan)
        assert job.codes() == [0] * count, job.outputs()
        return job

    def _start_once(self, count, folder, plan, end):
        (port,) = free_ports(1)
        members = []
        for index in range(count):
            name = f"{self._count}_{index}"
            whole = {
                "index": index,
                "count": count,
                "port": port,
                "folder": str(folder),
                "cache": str(self._folder / "cache"),
                **plan,
            }
            hidden = self._plans / f"{name}.new"
            hidden.write_text(json.dumps(whole))
            hidden.rename(self._plans / f"{name}.plan")
            members.append(Member(self._plans, name))
        self._count += 1
        return Job(folder, members, end)


def results(job, process=0, run=""):
    """Losses and variables of a run, without what was drawn at random."""
    with np.load(job.folder / f"found_{process}.npz") as file:
        wanted = [f"{run}{name}" for name in ("losses", "variable/")]
        return {
            name[len(run) :]: file[name]
            for name in file.files
            if name.startswith(tuple(wanted)) and "drawn" not in name
        }
