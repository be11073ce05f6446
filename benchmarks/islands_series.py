"""Trains by islands, each a process of its own, while it kills them: series for the islands' table.

A step takes as long as is set, of which computing it is a small part, so that islands on one
machine do not slow each other down; what an island does between steps comes on top. Processes are
forked from one that has built the program already: a start takes about a second, as reading a
checkpoint does.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np

import mtf_gradsync as gs
from benchmarks import less_communication, models, report
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.islands import Folder, Island

ISLANDS, BATCH, LENGTH = 4, 8, 32
TOKENS = BATCH * LENGTH  # of a step of one island
RATE, WARM_UP = 3e-3, 50
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.5


class Series(NamedTuple):
    """What happens in one training.

    Attributes:
      name: for tables.
      kill: the share of island-steps after which an island is killed.
      inner_steps: of a round.
      slow: how many times as long a step of the first island takes.
      merger_seconds: how long a merger lives, in the mean; 0 for ever.
      is_added: whether the last island is added when half of the tokens are merged.
      is_one: whether one program trains by `OuterOptimizer`, and all islands die with it.
      seed: of values, data and faults.
    """

    name: str
    kill: float = 0.0
    inner_steps: int = 10
    slow: float = 1.0
    merger_seconds: float = 0.0
    is_added: bool = False
    is_one: bool = False
    seed: int = 0


class Scale(NamedTuple):
    """How much is trained.

    Attributes:
      steps: of each island, if all are there always.
      step_seconds: how long a step takes.
      down_seconds: how long an island that was killed is away, in the mean, before it is started.
      most_seconds: a series ends then if it has not come to its tokens.
    """

    steps: int
    step_seconds: float
    down_seconds: float
    most_seconds: float

    @property
    def tokens(self) -> int:
        """Tokens at the end of a series."""
        return self.steps * ISLANDS * TOKENS


def language_model(replicas: int, batch: int) -> models.Model:
    """The README's language model, smaller, data parallel over some replicas."""
    return models.lm(
        layers=2, d_model=32, batch=batch, length=LENGTH, mesh_shape=f"batch:{replicas}",
        layout="batch:batch", scaled_embedding=True,
    )  # fmt: skip


def program(model: models.Model, variant: str, seed: int) -> tuple[simd.Program, models.Program]:
    """Builds a SIMD program of the model, with a placeholder "rate:0" for its learning rate."""
    made: list[simd.Program] = []

    @contextlib.contextmanager
    def block() -> Iterator[Any]:
        tf.set_random_seed(seed + 1)
        tf.placeholder(tf.float32, [], name="rate")
        with simd.tpu_program(model.mesh_shape, model.layout) as one:
            made.append(one)
            yield one.mesh_impl

    built = models.build(model, variant, block)
    return made[0], built


def run(series: Series, scale: Scale, directory: str) -> None:
    """Trains; leaves the folder, checkpoints of one program, and "record.json" in a directory.

    It forks processes: call it in a process that has not opened a session.
    """
    report.prepare()
    count = ISLANDS if series.is_one else 1
    model = language_model(count, BATCH * count)

    def optimizer() -> Any:
        inner = less_communication.Adam(learning_rate=RATE)
        mesh: dict[str, Any] = {"mesh_shape": model.mesh_shape, "layout": model.layout}
        if not series.is_one:
            return gs.CrossShardOptimizer(inner, **mesh)
        return gs.OuterOptimizer(
            inner, inner_steps=series.inner_steps, outer_learning_rate=OUTER_RATE,
            outer_momentum=OUTER_MOMENTUM, **mesh,
        )  # fmt: skip

    built = program(model._replace(make_optimizer=optimizer), models.BARE, series.seed)
    less_communication.text("train")  # read once, before the processes begin
    place = Path(directory)
    (place / "logs").mkdir(parents=True)
    work = _one_program if series.is_one else _island
    processes = [
        _Process(n, series, scale, place, work, built)
        for n in range(1 if series.is_one else ISLANDS)
    ]
    merger = None if series.is_one else _MergerProcess(series, place)
    try:
        _watch(series, scale, processes, merger, place)
    finally:
        for process in processes:
            process.kill()
        if merger:
            merger.stop()
    began = min(life["ready"] for process in processes for life in process.lives)
    record = {
        "began": began,
        "lives": [life for process in processes for life in process.lives],
        "kills": sum(process.kills for process in processes),
        "merger_kills": merger.kills if merger else 0,
    }
    (place / "record.json").write_text(json.dumps(record), encoding="utf-8")


def _watch(
    series: Series,
    scale: Scale,
    processes: list[_Process],
    merger: _MergerProcess | None,
    place: Path,
) -> None:
    """Starts and kills until the tokens are there."""
    until, done = time.time() + scale.most_seconds, 0.0
    tokens_of = _tokens_of_program if series.is_one else _MergedTokens(place).read
    while done < scale.tokens and time.time() < until:
        done = tokens_of(place)
        waits = series.is_added and done < scale.tokens / 2
        for process in processes[: -1 if waits else None]:
            process.tend()
        if merger:
            merger.tend()
        time.sleep(0.01)


class _MergedTokens:
    """Adds up the tokens of what decisions have merged, each read once."""

    def __init__(self, place: Path):
        self._folder, self._next, self._tokens = Folder(place / "folder"), 1, 0.0

    def read(self, _: Path) -> float:
        while decision := self._folder.read_json(f"decisions/{self._next:08d}.json"):
            self._tokens += sum(c["weight"] for c in decision["contributions"])
            self._next += 1
        return self._tokens


def _tokens_of_program(place: Path) -> float:
    rounds = rounds_of(place)
    return rounds[-1]["step"] * ISLANDS * TOKENS if rounds else 0.0


def rounds_of(place: Path) -> list[dict[str, Any]]:
    """The rounds of one program: "step", "time" and "path" of a checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads((place / "rounds.json").read_text("utf-8"))
    return []


class _Process:
    """An island, or one program: started, killed, and started again after a while."""

    def __init__(
        self, number: int, series: Series, scale: Scale, place: Path,
        work: Callable[..., None], built: Any,
    ):  # fmt: skip
        self.lives: list[dict[str, float]] = []
        self.kills = 0
        self._arguments = number, series, scale, place, built
        self._number, self._place, self._work = number, place, work
        self._down = scale.down_seconds
        self.step_seconds = scale.step_seconds * (series.slow if number == 0 else 1.0)
        # One program dies when one of its islands does.
        kill = series.kill * (ISLANDS if series.is_one else 1)
        self._life = self.step_seconds / kill if kill else math.inf
        self._random = random.Random(f"{series.seed} {number}")
        self._fork = multiprocessing.get_context("fork")
        self._shared: Any = None  # when it was ready, and the steps of this life
        self._process: Any = None
        self._start_at, self._kill_at = 0.0, math.inf

    def tend(self) -> None:
        """Starts or kills it if it is time to; raises RuntimeError if it has ended by itself."""
        now = time.time()
        if self._process is None:
            if now >= self._start_at:
                self._start()
            return
        if self._shared[0] and self._kill_at == math.inf and self._life < math.inf:
            self._kill_at = self._shared[0] + self._random.expovariate(1.0 / self._life)
        if now >= self._kill_at:
            self.kill()
            self.kills += 1
            self._start_at = now + self._random.uniform(0.5, 1.5) * self._down
        elif not self._process.is_alive():
            log = self._log.read_text("utf-8", "replace")
            raise RuntimeError(f"process {self._number} has ended by itself:\n{log[-3000:]}")

    @property
    def _log(self) -> Path:
        return self._place / "logs" / f"{self._number}"

    def _start(self) -> None:
        self._shared, self._kill_at = self._fork.Array("d", 2, lock=False), math.inf
        self._process = self._fork.Process(target=self._run, daemon=True)
        self._process.start()

    def _run(self) -> None:
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        self._work(*self._arguments, self._shared, self.step_seconds)

    def kill(self) -> None:
        """Kills it now, as ``kill -9`` does."""
        if self._process is None:
            return
        self._process.kill()
        self._process.join()
        if self._shared[0]:
            self.lives.append(
                {"island": self._number, "ready": self._shared[0], "end": time.time(),
                 "steps": self._shared[1], "step_seconds": self.step_seconds}
            )  # fmt: skip
        self._process = None


class _MergerProcess:
    """The command ``mtf-gradsync islands``, killed from time to time and started again at once."""

    def __init__(self, series: Series, place: Path):
        self.kills = 0
        self._seconds = series.merger_seconds
        self._random = random.Random(f"{series.seed} merger")
        self._command = [
            sys.executable, "-m", "mtf_gradsync_command", "islands", str(place / "folder"),
            "--keep_all", "--min_grace=0.5", "--max_grace=2",
            f"--outer_learning_rate={OUTER_RATE}", f"--outer_momentum={OUTER_MOMENTUM}",
        ]  # fmt: skip
        self._log = place / "logs" / "merger"
        self._process: subprocess.Popen[bytes] | None = None
        self._starts, self._kill_at = 0, math.inf

    def tend(self) -> None:
        """Starts or kills it if it is time to; raises RuntimeError if it has ended by itself."""
        if self._process is None:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
            self._starts, self._kill_at = self._starts + 1, math.inf
        elif time.time() >= self._kill_at:
            self._process.kill()
            self._process.wait()
            self._process = None
            self.kills += 1
        elif self._seconds and self._kill_at == math.inf:
            if self._log.read_text("utf-8").count("merging in") == self._starts:
                self._kill_at = time.time() + self._random.expovariate(1.0 / self._seconds)
        elif self._process.poll() is not None:
            raise RuntimeError(f"The merger has ended by itself:\n{self._log.read_text('utf-8')}")

    def stop(self) -> None:
        """Lets it finish what it has decided on, and end."""
        if self._process:
            self._process.terminate()
            self._process.wait()


def _island(
    number: int, series: Series, scale: Scale, place: Path,
    built: tuple[simd.Program, models.Program], shared: Any, step_seconds: float,
) -> None:  # fmt: skip
    """Trains as one island until it is killed."""
    with _session(built) as session:
        made = Island(str(place / "folder"), f"island-{number}", series.inner_steps, wait="none")
        checkpoint = _Checkpoint(place / f"island-{number}")
        step = checkpoint.restore(session)
        made.begin(session, step)
        while True:
            _step(session, built[1], series.seed, [number], step, step_seconds)
            step += 1
            _count(shared, step_seconds)
            made.after_step(session, TOKENS)
            if step % series.inner_steps == 0:
                checkpoint.save(session, step)


def _one_program(
    number: int, series: Series, scale: Scale, place: Path,
    built: tuple[simd.Program, models.Program], shared: Any, step_seconds: float,
) -> None:  # fmt: skip
    """Trains all islands in one program until it is killed."""
    with _session(built) as session:
        checkpoint = _Checkpoint(place / "program", keeps_all=True)
        step = checkpoint.restore(session)
        while True:
            _step(session, built[1], series.seed, range(ISLANDS), step, step_seconds)
            step += 1
            _count(shared, step_seconds)
            if step % series.inner_steps == 0:
                path = checkpoint.save(session, step)
                one = {"step": step, "time": time.time(), "path": path}
                _write(place / "rounds.json", [*rounds_of(place), one])


@contextlib.contextmanager
def _session(built: tuple[simd.Program, models.Program]) -> Iterator[Any]:
    made, parts = built
    with parts.graph.as_default(), made.session(parts.lowering) as session:
        yield session


def _step(
    session: Any, built: models.Program, seed: int, numbers: Any, step: int, seconds: float
) -> None:
    """Makes a step, and waits until it has taken its time."""
    until = time.monotonic() + seconds
    parts = [
        less_communication.batch_of(
            "train", (BATCH, LENGTH), np.random.RandomState([seed, number, step])
        )
        for number in numbers
    ]
    rate = RATE * min(1.0, (step + 1) / WARM_UP) * less_communication.bias_correction(step)
    session.run([built.loss, built.update], {built.x: np.concatenate(parts), "rate:0": rate})
    time.sleep(max(0.0, until - time.monotonic()))


def _count(shared: Any, step_seconds: float) -> None:
    """Counts a step; the first one is the end of a start: TensorFlow prepares the graph in it."""
    shared[1] += 1
    if not shared[0]:
        shared[0] = time.time() - step_seconds


class _Checkpoint:
    """Checkpoints in a directory; a file says which one is whole."""

    def __init__(self, directory: Path, keeps_all: bool = False):
        self._directory, self._keeps_all = directory, keeps_all
        self._newest = directory / "newest.json"

    def restore(self, session: Any) -> int:
        """Returns the step of the newest checkpoint, 0 where there is none."""
        if not self._newest.exists():
            return 0
        found = json.loads(self._newest.read_text("utf-8"))
        session.restore(found["path"])
        return found["step"]

    def save(self, session: Any, step: int) -> str:
        """Writes a checkpoint and returns its path."""
        self._directory.mkdir(exist_ok=True)
        path = session.save(str(self._directory / f"step-{step}"))
        _write(self._newest, {"step": step, "path": path})
        if not self._keeps_all:
            for file in self._directory.glob("step-*"):
                if not file.name.startswith(f"step-{step}."):
                    file.unlink()
        return path


def _write(path: Path, value: Any) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(value), encoding="utf-8")
    os.replace(beside, path)
