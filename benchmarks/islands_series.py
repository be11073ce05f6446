"""Trains by islands, each a process of its own, while it kills them: series for the islands' table.

A step takes as long as is set, of which computing it is a small part, so that islands on one
machine do not slow each other down; what an island does between steps comes on top. Processes are
forked from one that has built the program already: a start takes about a second, as reading a
checkpoint does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple

import msgspec
import numpy as np

import mtf_gradsync as gs
from benchmarks import less_communication, models, report
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.islands import Folder, Island, Merger, MergeSettings, Waiting
from mtf_gradsync.tools.islands.objects import Decision
from mtf_gradsync.tools.islands.tensor_files import TensorSpec

ISLANDS, BATCH, LENGTH = 4, 8, 32
TOKENS = BATCH * LENGTH  # of a step of one island
RATE, WARM_UP = 3e-3, 50
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.5
CHECKPOINT_STEPS = 2  # of an island


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
      kills: how many are enough, whatever was trained; its islands are numbers without a model.
      faults: how many faults of the folder are enough, beside the kills.
      seed: of values, data and faults.
    """

    name: str
    kill: float = 0.0
    inner_steps: int = 10
    slow: float = 1.0
    merger_seconds: float = 0.0
    is_added: bool = False
    is_one: bool = False
    kills: int = 0
    faults: int = 0
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
    place = Path(directory)
    place.mkdir(parents=True)
    built = None
    if not series.kills:
        built = _built(series)
        less_communication.text("train")  # read once, before the processes begin
    work = _one_program if series.is_one else _numbers if series.kills else _island

    faults = Faults(place / "folder")

    def process(number: int) -> _Process:
        # One program dies when one of its islands does.
        kill = series.kill * (ISLANDS if series.is_one else 1)
        step_seconds = scale.step_seconds * (series.slow if number == 0 else 1.0)
        life = step_seconds / kill if kill else math.inf
        given = (number, series, scale, place, built, faults)
        return _Process(f"{number}", work, given, life, scale.down_seconds, step_seconds)

    processes = [process(number) for number in range(1 if series.is_one else ISLANDS)]
    merger = _Process(
        "merger", _merger, (series, scale, place, faults), series.merger_seconds or math.inf,
        scale.down_seconds / 4, scale.step_seconds,
    )  # fmt: skip
    try:
        _watch(series, scale, processes, merger, place, faults)
    finally:
        faults.end()
        for one in (*processes, merger):
            one.kill()
    began = min(life["ready"] for process in processes for life in process.lives)
    record = {
        "began": began,
        "lives": [life for process in processes for life in process.lives],
        "kills": sum(process.kills for process in processes),
        "merger_kills": merger.kills,
        "faults": faults.made,
    }
    (place / "record.json").write_text(json.dumps(record), encoding="utf-8")


def _built(series: Series) -> tuple[simd.Program, models.Program]:
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

    return program(model._replace(make_optimizer=optimizer), models.BARE, series.seed)


def _watch(
    series: Series, scale: Scale, processes: list[_Process], merger: _Process, place: Path,
    faults: Faults,
) -> None:  # fmt: skip
    """Starts and kills until the tokens are there, or the kills and the faults."""
    until, done = time.time() + scale.most_seconds, 0.0
    tokens_of = _tokens_of_program if series.is_one else _MergedTokens(place).read
    while time.time() < until:
        done = tokens_of(place)
        kills = merger.kills + sum(process.kills for process in processes)
        is_enough = kills >= series.kills and sum(faults.made.values()) >= series.faults
        if is_enough if series.kills else done >= scale.tokens:
            return
        if series.faults and done:
            faults.tend(all(one.is_settled for one in (*processes, merger)))
        if faults.is_away:  # who begins now would begin in another folder
            time.sleep(0.01)
            continue
        waits = series.is_added and done < scale.tokens / 2
        for process in processes[: -1 if waits else None]:
            process.tend()
        if not series.is_one:
            merger.tend()
        time.sleep(0.01)


class _MergedTokens:
    """Adds up the tokens of what decisions have merged, each read once.

    It opens files itself: processes that are forked later cannot use an object store in which this
    one has read.
    """

    def __init__(self, place: Path):
        self._decisions, self._next, self._tokens = place / "folder" / "decisions", 1, 0.0

    def read(self, _: Path) -> float:
        with contextlib.suppress(FileNotFoundError):
            while True:
                data = (self._decisions / f"{self._next:08d}.json").read_bytes()
                decision = msgspec.json.decode(data, type=Decision)
                self._tokens += sum(c.weight for c in decision.contributions)
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
    """An island, a merger or one program: started, killed, and started again after a while."""

    def __init__(
        self, name: str, work: Callable[..., None], arguments: tuple[Any, ...],
        life_seconds: float, down_seconds: float, step_seconds: float,
    ):  # fmt: skip
        self.lives: list[dict[str, Any]] = []
        self.kills = 0
        self._name, self._work, self._arguments = name, work, arguments
        self._life, self._down, self._step_seconds = life_seconds, down_seconds, step_seconds
        self._random = random.Random(name)
        self._fork = multiprocessing.get_context("fork")
        self._shared: Any = None  # when it was ready; steps of this life; those in a checkpoint
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
            raise RuntimeError(f"process {self._name} has ended by itself")

    @property
    def is_settled(self) -> bool:
        """Whether it does not begin just now."""
        return self._process is None or bool(self._shared[0])

    def _start(self) -> None:
        self._shared, self._kill_at = self._fork.Array("d", 3, lock=False), math.inf
        given = (*self._arguments, self._shared, self._step_seconds)
        self._process = self._fork.Process(target=self._work, args=given, daemon=True)
        self._process.start()

    def kill(self) -> None:
        """Kills it now, as ``kill -9`` does."""
        if self._process is None:
            return
        self._process.kill()
        self._process.join()
        if self._shared[0]:
            self.lives.append(
                {"name": self._name, "ready": self._shared[0], "end": time.time(),
                 "steps": self._shared[1], "kept": self._shared[2],
                 "step_seconds": self._step_seconds}
            )  # fmt: skip
        self._process = None


def _merger(
    series: Series, scale: Scale, place: Path, faults: Faults, shared: Any, step_seconds: float
) -> None:
    """Merges until it is killed, as the command ``mtf-gradsync islands`` does."""
    if series.faults:
        faults.begin()
    merger = merger_of(place / "folder", series.inner_steps * step_seconds)
    shared[0] = _clock()
    merger.run()


def merger_of(folder: Path, round_seconds: float) -> Merger:
    """A merger that waits for a third of a round to one and a half."""
    return Merger(
        Folder(folder),
        MergeSettings(OUTER_RATE, OUTER_MOMENTUM),
        Waiting(1, round_seconds / 3, 1.5 * round_seconds),
        keep_all=True,
        poll_seconds=min(0.2, round_seconds / 10),
    )


class Faults:
    """What goes wrong with a folder, in all processes that use it, for half a second each time."""

    def __init__(self, folder: Path):
        self._folder, self._away = folder, folder.with_name("away")
        self._now = multiprocessing.get_context("fork").Array("d", 2, lock=False)  # kind, until
        self._random, self._next = random.Random(0), 0.0
        self.made = dict.fromkeys(FAULTS, 0)

    @property
    def is_away(self) -> bool:
        """Whether the folder has another name now."""
        return self._away.exists()

    def tend(self, is_settled: bool) -> None:
        """Begins or ends a fault if it is time to; `is_settled` if all have found the folder."""
        now = time.time()
        if self.is_away and now >= self._now[1]:
            self._put_back()
        if now < self._next:
            return
        kind = min(FAULTS, key=lambda one: (self.made[one], self._random.random()))
        if kind == "renamed" and not is_settled:
            return
        self.made[kind] += 1
        self._now[0], self._now[1] = FAULTS.index(kind), now + 0.5
        self._next = now + 0.9
        if kind == "renamed":
            os.rename(self._folder, self._away)

    def end(self) -> None:
        """Ends the fault of now."""
        self._now[1] = 0.0
        if self.is_away:
            self._put_back()

    def _put_back(self) -> None:
        # What a request that was on its way has made in its place.
        shutil.rmtree(self._folder, ignore_errors=True)
        os.rename(self._away, self._folder)

    def _kind(self) -> str:
        """What goes wrong now with half of the requests, "" for nothing."""
        is_now = _clock() < self._now[1] and self._random.random() < 0.5
        return FAULTS[int(self._now[0])] if is_now else ""

    def begin(self) -> None:
        """Makes the requests of this process fail as `tend` says."""
        import obstore
        from obstore.exceptions import GenericError, NotFoundError

        self._random = random.Random(os.getpid())
        hours = self._random.choice([-5.0, 0.0, 0.0, 7.0])
        time.time = lambda: _clock() + 3600.0 * (hours if self._kind() == "clock" else 0.0)
        put, get, listed = obstore.put, obstore.get, os.scandir

        def kind_at(place: Any) -> str:
            """What goes wrong now in a store or a path; nothing does in other folders."""
            at = str(getattr(place, "prefix", place))
            return self._kind() if at.startswith(str(self._folder)) else ""

        def reading(work: Callable[..., Any]) -> Callable[..., Any]:
            def asked(place: Any, *args: Any, **more: Any) -> Any:
                kind = kind_at(place)
                if kind == "503":
                    wrong = GenericError if hasattr(place, "prefix") else OSError
                    raise wrong("503 Service Unavailable")
                if kind == "EIO":
                    raise OSError(errno.EIO, "Input/output error")
                return work(place, *args, **more)

            return asked

        def writing(store: Any, name: str, data: bytes, **more: Any) -> Any:
            kind = kind_at(store)
            if kind == "full":
                raise OSError(errno.ENOSPC, "No space left on device")
            if kind == "half write":
                path = self._folder / name
                if name.startswith("contributions/") and self._random.random() < 0.5:
                    return put(store, name, data[: len(data) // 2], **more)
                with contextlib.suppress(OSError):
                    path.with_name(f"{path.name}#1").write_bytes(data[: len(data) // 2])
                raise OSError(errno.EIO, "Input/output error")
            found = reading(put)(store, name, data, **more)
            if kind == "404 after put":
                raise NotFoundError("404 Not Found")
            return found

        obstore.put, obstore.get, os.scandir = writing, reading(get), reading(listed)


FAULTS = ("503", "404 after put", "half write", "EIO", "renamed", "full", "clock")
_clock = time.time


class _Numbers:
    """Values of a session that is a dictionary."""

    def __init__(self) -> None:
        self.specs = {"a": TensorSpec((64, 96), "float32"), "b": TensorSpec((), "float32")}

    def read(self, session: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: value.copy() for name, value in session.items()}

    def write(self, session: dict[str, np.ndarray], values: dict[str, np.ndarray]) -> None:
        session.update({name: np.array(value) for name, value in values.items()})


def _numbers(
    number: int, series: Series, scale: Scale, place: Path, built: Any, faults: Faults,
    shared: Any, step_seconds: float,
) -> None:  # fmt: skip
    """An island of numbers that move at random, without TensorFlow, until it is killed."""
    if series.faults:
        faults.begin()
    random_numbers = np.random.RandomState(os.getpid())
    made, session, checkpoint, step = numbers_of(place, number, series, step_seconds)
    shared[0] = _clock()
    while True:
        session["a"] = session["a"] + random_numbers.standard_normal((64, 96)).astype(np.float32)
        session["b"] = session["b"] - np.float32(1.0)
        step += 1
        shared[1] += 1
        made.after_step(session, TOKENS)
        path = checkpoint.path(step)
        made.save(path)
        checkpoint.save_values(session, step)
        shared[2] = shared[1]
        time.sleep(step_seconds)


def numbers_of(
    place: Path, number: int, series: Series, step_seconds: float
) -> tuple[Island, dict[str, np.ndarray], _Checkpoint, int]:
    """An island of numbers that has begun; its values, its checkpoints, and its step.

    Of the numbers one counts steps: a change of it is how many are in it.
    """
    values, checkpoint = _Numbers(), _Checkpoint(place / f"island-{number}")
    session = {name: np.zeros(spec.shape, np.float32) for name, spec in values.specs.items()}
    step = checkpoint.restore_values(session)
    made = Island(
        str(place / "folder"), f"island-{number}", series.inner_steps, values=values, wait="none",
        follow="own", poll_seconds=step_seconds,
    )  # fmt: skip
    made.begin(session, step, checkpoint.path(step))
    return made, session, checkpoint, step


def _island(
    number: int, series: Series, scale: Scale, place: Path,
    built: tuple[simd.Program, models.Program], faults: Faults, shared: Any, step_seconds: float,
) -> None:  # fmt: skip
    """Trains as one island until it is killed."""
    with _session(built) as session:
        made = Island(str(place / "folder"), f"island-{number}", series.inner_steps, wait="none")
        checkpoint = _Checkpoint(place / f"island-{number}")
        step = checkpoint.restore(session)
        made.begin(session, step, checkpoint.path(step))
        while True:
            _step(session, built[1], series.seed, [number], step, step_seconds)
            step += 1
            _count(shared, step_seconds)
            made.after_step(session, TOKENS)
            if step % CHECKPOINT_STEPS == 0:
                made.save(checkpoint.path(step))
                checkpoint.save(session, step)


def _one_program(
    number: int, series: Series, scale: Scale, place: Path,
    built: tuple[simd.Program, models.Program], faults: Faults, shared: Any, step_seconds: float,
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
        shared[0] = _clock() - step_seconds


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

    def path(self, step: int) -> str:
        """The path of the checkpoint of a step."""
        return str(self._directory / f"step-{step}")

    def save(self, session: Any, step: int) -> str:
        """Writes a checkpoint and returns its path."""
        self._directory.mkdir(exist_ok=True)
        path = session.save(self.path(step))
        self._note(step, path)
        return path

    def _note(self, step: int, path: str) -> None:
        _write(self._newest, {"step": step, "path": path})
        if not self._keeps_all:
            for file in self._directory.glob("step-*"):
                if not file.name.startswith(f"step-{step}."):
                    file.unlink()

    def restore_values(self, values: dict[str, np.ndarray]) -> int:
        """Reads what `save_values` has written; returns the step, 0 where there is nothing."""
        if not self._newest.exists():
            return 0
        found = json.loads(self._newest.read_text("utf-8"))
        with np.load(found["path"]) as stored:
            values.update(stored)
        return found["step"]

    def save_values(self, values: dict[str, np.ndarray], step: int) -> None:
        """Writes values without a session."""
        path = f"{self.path(step)}.npz"
        np.savez(path, **values)
        self._note(step, path)


def _write(path: Path, value: Any) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(value), encoding="utf-8")
    os.replace(beside, path)
