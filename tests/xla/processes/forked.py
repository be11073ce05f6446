"""A program that has built the model, and forks a process for each part of a job.

Importing TensorFlow and building the model take longer than most jobs of these tests.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import runpy
import signal
import sys
import time

from tests.xla.processes import job


def run(folder, name, model):
    """The life of a forked process."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: to end with its parent
    output = os.open(folder / f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    plan = json.loads((folder / f"{name}.plan").read_text())
    if "script" in plan:
        arguments = f"127.0.0.1:{plan['port']}", plan["count"], plan["index"], plan["folder"]
        sys.argv = [plan["script"], *map(str, arguments)]
        runpy.run_path(plan["script"], run_name="__main__")
    else:
        job.main(plan, model)


def main(folder):
    os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="")
    job.prepare()
    model = job.Model()
    children = {}
    known = set()
    while True:
        for path in folder.glob("*.plan"):
            if path.stem in known:
                continue
            known.add(path.stem)
            pid = os.fork()
            if pid == 0:
                # As the interpreter does it for a program.
                run(folder, path.stem, model)
                return
            children[pid] = path.stem
            (folder / f"{path.stem}.pid").write_text(str(pid))
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                path = folder / f"{children.pop(pid)}.code"
                # At once, because others look at it meanwhile.
                unfinished = path.with_suffix(".unfinished")
                unfinished.write_text(str(code))
                unfinished.replace(path)
        time.sleep(0.05)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
