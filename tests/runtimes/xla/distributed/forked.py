"""A program that has built the models, and forks a process for each part of a job.

Importing TensorFlow, building a model and splitting its graph take longer than most jobs of these
tests.

TensorFlow computes constants while a graph is built, in threads that all its devices share, and a
fork has no threads. With TF_OVERRIDE_GLOBAL_THREADPOOL=1 the devices of each session have theirs.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import pathlib
import runpy
import signal
import sys
import time

# Read when jax and TensorFlow are imported.
os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="", TF_OVERRIDE_GLOBAL_THREADPOOL="1")

from mtf_gradsync.runtimes.simd.replica_session import lowerings_in
from mtf_gradsync.xla import executable
from tests import grappler
from tests.runtimes.xla.distributed import job


@functools.lru_cache(maxsize=None)
def model_with_parts(islands):
    model = job.Model(islands=islands)
    parts = executable.HostGraph(model.program, lowerings_in(model.lowering))
    return model, parts


def run(folder, name, plan):
    """The life of a forked process."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: to end with its parent
    output = os.open(folder / f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if "script" in plan:
        arguments = f"127.0.0.1:{plan['port']}", plan["count"], plan["index"], plan["folder"]
        sys.argv = [plan["script"], *map(str, arguments)]
        runpy.run_path(plan["script"], run_name="__main__")
    else:
        model, parts = model_with_parts(plan.get("odd") == "islands")
        make = executable.HostGraph
        executable.HostGraph = lambda program, lowerings: (
            parts if program is model.program else make(program, lowerings)
        )
        job.main(plan, model)


def main(folder):
    job.prepare()
    grappler.turn_off()
    gc.set_threshold(100_000, 20, 20)
    children = {}
    known = set()
    while True:
        for path in folder.glob("*.plan"):
            if path.stem in known:
                continue
            known.add(path.stem)
            plan = json.loads(path.read_text())
            if "script" not in plan:
                model_with_parts(plan.get("odd") == "islands")
            # A collection in a fork would copy the pages of all that is built.
            gc.freeze()
            pid = os.fork()
            if pid == 0:
                # As the interpreter does it for a program.
                run(folder, path.stem, plan)
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
