"""Trains a small model again and again over several processes, on a machine with other work.

    python -m tests.runtimes.xla.distributed.many_runs --processes=2 --runs=20 --steps=2000

All runs must come to the losses of the first one bit for bit, on every process, and to those of one
process but for rounding. Meanwhile as many other processes as there are cores take all that they
get. Says a line for each run; ends with exit code 1 at the first run that fails or differs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np

from benchmarks.cluster import free_ports
from mtf_gradsync import xla
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.settings import enable_mesh_defaults
from mtf_gradsync.runtimes.starting import Start
from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train.model import resolve_job
from mtf_gradsync.tools.train.runner import choose_runtime, training_graph

CORES = 8
BINDINGS = (
    "train.run.mesh_shape = 'batch:4;model:2'",
    "Unitransformer.max_length = 64",
    "train.run.eval_dataset_fn = None",
    "train.run.runtime = 'xla'",
    # At tiny.gin's rate, ten times this, one rounding grows to anything within 2,000 steps.
    "train.run.learning_rate_schedule = 0.003",
)
# Read when jax and TensorFlow are imported. A fork has no threads: sessions make their own then.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "TF_OVERRIDE_GLOBAL_THREADPOOL": "1"}
_TINY = Path(__file__).resolve().parents[3] / "tools" / "train" / "tiny.gin"


class _Batches:
    """Tokens that follow from the step, without an input pipeline."""

    def __init__(self, shape: list[int]):
        self._shape = shape

    def placeholders(self) -> dict[str, tf.Tensor]:
        self._feeds = {"targets": tf.placeholder(tf.int32, self._shape, name="targets")}
        return self._feeds

    def begin(self, first: int) -> None:
        self._step = first

    def next(self) -> dict[tf.Tensor, np.ndarray]:
        self._step += 1
        # Each token is the one before it plus a number of the row: there is something to learn.
        random = np.random.RandomState(self._step)
        rows, length = self._shape
        begin, stride = random.randint(1, 200, [2, rows, 1])
        return {self._feeds["targets"]: 1 + (begin + stride % 7 * np.arange(length)) % 200}


class Model:
    """The training graph, built once; every process is a fork that has it."""

    def __init__(self) -> None:
        enable_mesh_defaults()
        gin_files.load([str(_TINY)], list(BINDINGS))
        self._config = config = gin_files.bound_run_config()
        self._graph = tf.Graph()
        with self._graph.as_default():
            tf.set_random_seed(1)
            job = resolve_job(config)
            batches = _Batches([job.model.batch_size, job.model.feature_length("targets")])
            made, _, self._runner = training_graph(
                job, batches, choose_runtime(config), tf.ConfigProto()
            )
            self.num_parameters = made.num_parameters

    def train(self, steps: int) -> np.ndarray:
        """The losses of some steps, made as ``mtf-gradsync train`` makes them."""
        losses: list[float] = []
        waiting: list[Callable[[], Any]] = []
        with self._graph.as_default():
            with self._runner("", Start(), self._config) as runner:
                for _ in range(steps):
                    assert runner.agreed_stop(None) is None
                    waiting.append(runner.dispatch())
                    if len(waiting) > runner.steps_ahead:
                        losses.append(waiting.pop(0)()["loss"])
                losses += [result()["loss"] for result in waiting]
        return np.array(losses, np.float32)


def _fork(work: Callable[[], None], output: Path | None = None) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if output is not None:
            with output.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
        work()
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        os._exit(code)


def _burn() -> None:
    while True:
        pass


def _losses(model: Model, processes: int, steps: int, folder: Path) -> list[np.ndarray]:
    """One run's losses, on each process.

    Raises:
      RuntimeError: with what was printed, when a process failed.
    """
    port = free_ports(1)[0]

    def work(index: int) -> None:
        if processes == 1:
            found = model.train(steps)
        else:
            with xla.start_processes(
                f"127.0.0.1:{port}",
                processes,
                index,
                cpu_devices=CORES // processes,
                silence=300.0,  # on a machine that busy a process may get nothing for long
            ):
                found = model.train(steps)
        np.save(folder / f"{index}.npy", found)

    outputs = [folder / f"{index}.out" for index in range(processes)]
    started = [_fork(lambda i=i: work(i), out) for i, out in enumerate(outputs)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
    if any(codes):
        said = "\n".join(f"--- {i}\n{out.read_text()}" for i, out in enumerate(outputs))
        raise RuntimeError(f"The processes ended with {codes}.\n{said}")
    return [np.load(folder / f"{index}.npy") for index in range(processes)]


def main(arguments: list[str]) -> int:
    """Makes the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--other_work", type=int, default=os.cpu_count(), help="busy processes")
    parser.add_argument("--keep", type=Path, help="folder for the losses, as .npy files")
    args = parser.parse_args(arguments)
    model = Model()
    print(f"{model.num_parameters:,} parameters", flush=True)
    burning = [_fork(_burn) for _ in range(args.other_work)]
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (alone,) = _losses(model, 1, args.steps, folder)
            first = None
            for run in range(1, args.runs + 1):
                began = time.monotonic()
                found = _losses(model, args.processes, args.steps, folder)
                if first is None:
                    first = found[0]
                    if args.keep:
                        np.save(args.keep / "alone.npy", alone)
                        np.save(args.keep / "first.npy", first)
                if any(not np.array_equal(losses, first) for losses in found):
                    print(f"run {run}: other bits than the first", flush=True)
                    return 1
                worst = float(np.max(np.abs(first / alone - 1)))
                print(
                    f"run {run}: {args.steps} steps on {args.processes} processes in "
                    f"{time.monotonic() - began:.0f} s, loss {first[0]:.4f} to {first[-1]:.4f}, "
                    f"the same bits; one process to {worst:.1e}",
                    flush=True,
                )
                # A rounding of each step, one behind the other.
                if worst > args.steps * np.finfo(np.float32).eps:
                    return 1
    except RuntimeError as error:
        print(error, flush=True)
        return 1
    finally:
        for pid in burning:
            os.kill(pid, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    if not _ENVIRONMENT.items() <= os.environ.items():
        command = [sys.executable, "-m", "tests.runtimes.xla.distributed.many_runs", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **_ENVIRONMENT})
    sys.exit(main(sys.argv[1:]))
