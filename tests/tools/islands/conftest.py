"""Islands in one process: each in a thread, with a graph and a session of its own."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Iterator, Sequence

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.islands import Island, Merger, MergeSettings, Waiting
from mtf_gradsync.tools.islands.folder import Folder
from mtf_gradsync.tools.islands.journal import read_status
from tests import harness, models, sessions
from tests.tools.train.conftest import after_step, mesh_defaults, train  # noqa: F401

STEPS = 20


KINDS = ["placement", "simd", pytest.param("xla", marks=pytest.mark.xla)]
D, BATCH = mtf.Dimension("d", 6), mtf.Dimension("batch", 4)


def line(wrap, dtype=None, more=lambda mesh, x, w: []):
    """Builds a program whose only variable, of ones, has the mean of its input as its gradient."""

    def build(mesh, inputs):
        x = mtf.import_tf_tensor(mesh, inputs["x"], [BATCH, D])
        initializer = tf.ones_initializer()
        w = mtf.get_variable(mesh, "w", [D], dtype=dtype or tf.float32, initializer=initializer)
        loss = mtf.reduce_sum(x * mtf.cast(w, tf.float32)) / BATCH.size
        updates = wrap(mtf.optimize.SgdOptimizer(1.0)).minimize(loss)
        return [*updates, *more(mesh, x, w)], {}

    return build


def feed(value):
    """Inputs of the program of `line` that are all one number."""
    return {"x": np.full([4, 6], value, np.float32)}


def contributions(folder):
    """(steps, tokens) of each merged contribution, by island."""
    found = {}
    for decision in read_status(Folder(str(folder))).decisions[1:]:
        for one in decision.contributions:
            found.setdefault(one.island, []).append((one.steps, one.tokens))
    return found


def batches(steps: int) -> list[dict[str, np.ndarray]]:
    """Small ones, on which momentum inside of momentum does not diverge."""
    return [{k: v * np.float32(0.3) for k, v in x.items()} for x in models.mlp_batches(steps)]


def part_of(feeds: Sequence[dict[str, np.ndarray]], number: int, count: int) -> list[Any]:
    """The batches of one island of some, which have equal parts; as large as the whole, so that
    the model is the same.
    """
    return [
        {k: np.concatenate([np.split(v, count)[number]] * count) for k, v in feed.items()}
        for feed in feeds
    ]


class Program:
    """A program in a graph of its own, and an island of it.

    It trains the model by the optimizer of a name, or is what a function builds.
    """

    def __init__(
        self, kind: str, mesh: str, opt: Any, feed: dict[str, np.ndarray], folder: Any, name: str,
        inner_steps: int, **arguments: Any,
    ):  # fmt: skip
        shape, layout, dims = harness.MESHES[mesh]

        def make() -> gs.CrossShardOptimizer:
            return gs.CrossShardOptimizer(models.OPTIMIZERS[opt]())  # in order, as bare is not

        build = opt if callable(opt) else models.train(make, dims)
        self.folder, self.built = folder, harness.built(kind, shape, layout, build, feed)
        with self.built.graph.as_default():
            arguments.setdefault("poll_seconds", 0.01)
            self.island = Island(
                str(folder), name, inner_steps, lowering=self.built.lowering, **arguments
            )

    def session(self) -> contextlib.AbstractContextManager[Any]:
        """A session with initialized variables."""
        return sessions.session_of(self.built, tf.train.Saver)

    @contextlib.contextmanager
    def begun(self, settings: MergeSettings) -> Iterator[Any]:
        """A session whose island has begun with version 0."""
        with self.session() as session:
            with merging(self.folder, settings):
                self.island.begin(session)
            yield session

    def step(self, session: Any, feed: dict[str, np.ndarray]) -> None:
        """Makes one step of the program."""
        session.run(self.built.updates, {self.built.inputs[k]: v for k, v in feed.items()})

    def learn(self, session: Any, feed: dict[str, np.ndarray], tokens: float = 1.0) -> None:
        """Makes one step of the program and of its island."""
        self.step(session, feed)
        self.island.after_step(session, tokens)

    def train(
        self, feeds: Sequence[dict[str, np.ndarray]], tokens: Callable[[int], float] = lambda s: 1.0
    ) -> dict[str, np.ndarray]:
        """Makes a step for each feed; returns the variables that islands exchange."""
        with self.session() as session:
            self.island.begin(session)
            for number, feed in enumerate(feeds, 1):
                self.learn(session, feed, tokens(number))
            self.island.close()
            return self.island._values.read(session)


class Monitored:
    """What a monitored session trains a program of a placement mesh with, and its step."""

    def __init__(self, program: Program):
        self.built = program.built
        self.global_step = tf.train.get_or_create_global_step()
        with tf.control_dependencies(self.built.updates):
            self.train = tf.assign_add(self.global_step, 1)
        self.saver = tf.train.Saver()

    def session(self, directory: Any, hooks: Sequence[Any]) -> tf.train.MonitoredSession:
        """A session that begins from the newest checkpoint of a directory."""
        scaffold = tf.train.Scaffold(
            init_op=tf.group(*self.built.init, self.global_step.initializer),
            local_init_op=self.built.restore, saver=self.saver,
        )  # fmt: skip
        creator = tf.train.ChiefSessionCreator(
            scaffold, config=harness.placement_config(2), checkpoint_dir=str(directory)
        )
        return tf.train.MonitoredSession(creator, hooks)

    def steps(self, session: Any, feeds: Sequence[dict[str, np.ndarray]]) -> None:
        """Makes a step for each feed."""
        for feed in feeds:
            session.run(self.train, {self.built.inputs[k]: v for k, v in feed.items()})


def at_once(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of functions that run in threads of their own; raises the first error."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = works[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@contextlib.contextmanager
def merging(
    folder: Any, settings: MergeSettings | None = None, waiting: Waiting | None = None, **more: Any
) -> Iterator[None]:
    """A merger that works in a thread while the block runs."""
    merger = Merger(Folder(str(folder)), settings, waiting, poll_seconds=0.01, **more)
    stop = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            merger.run(stop.is_set)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def folder(tmp_path):
    """The folder that the islands of a test meet in."""
    return tmp_path / "islands"
