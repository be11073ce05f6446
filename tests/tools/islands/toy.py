"""Islands without TensorFlow, and a folder whose writer may be killed."""

from __future__ import annotations

import itertools
import time
from typing import Any, Mapping

import numpy as np

from mtf_gradsync.islands import (
    Island,
    Merger,
    MergeSettings,
)
from mtf_gradsync.tools.islands.folder import Folder
from mtf_gradsync.tools.islands.tensor_files import TensorSpec
from mtf_gradsync.tools.islands.versions import newest_version, read_values
from tests.tools.islands.conftest import merging


class ToyValues:
    """Reads and writes the values of a session that is a dictionary."""

    def __init__(self, specs: Mapping[str, TensorSpec]):
        self.specs = dict(specs)

    def read(self, session: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `mtf_gradsync.tools.islands.session_values.Values`."""
        return {name: value.copy() for name, value in session.items()}

    def write(self, session: dict[str, np.ndarray], values: Mapping[str, np.ndarray]) -> None:
        """See `mtf_gradsync.tools.islands.session_values.Values`."""
        session.update({name: np.array(value) for name, value in values.items()})


def new_session() -> dict[str, np.ndarray]:
    """Values of two variables: session of an island that begins."""
    return {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float32(2.0).reshape(())}


class Toy:
    """An island, and its session of values."""

    def __init__(self, folder: Any, name: str, inner_steps: int, **arguments: Any):
        dtype = arguments.pop("dtype", "float32")
        self.session = {k: v.astype(dtype) for k, v in new_session().items()}
        values = ToyValues({name: TensorSpec.of(value) for name, value in self.session.items()})
        arguments.setdefault("poll_seconds", 1e-9)
        self.island = Island(str(folder), name, inner_steps, values=values, **arguments)
        self.is_blind = False  # whether it sees no versions

    def begin(self, step: int = 0) -> Toy:
        """Begins, and returns itself."""
        self.island.begin(self.session, step)
        if self.island._exchange:
            look = self.island._exchange.look_for_version
            self.island._exchange.look_for_version = lambda version, at_once=False: (
                (version, False) if self.is_blind else look(version, at_once)
            )
        return self

    def step(self, move: float, tokens: float = 1.0) -> None:
        """Makes a step that takes `move` away from all values."""
        for name, value in self.session.items():
            self.session[name] = (value - np.float32(move)).astype(value.dtype)
        self.island.after_step(self.session, tokens)

    def steps(self, count: int, move: float, tokens: float = 1.0) -> None:
        """Makes steps that each take `move` away from all values."""
        for _ in range(count):
            self.step(move, tokens)

    def kill(self) -> None:
        """Ends its heartbeats, as if the process were killed."""
        self.island._exchange.lease.abandon()

    @property
    def b(self) -> float:
        """The value of the scalar."""
        return float(self.session["b"])


class Killed(BaseException):
    """A process was killed here."""


class FragileFolder(Folder):
    """A folder before or after whose n-th change its writer is killed."""

    def __init__(self, url: str, dies_at: int, after: bool):
        super().__init__(url)
        self.left, self._after = dies_at, after

    def _die(self) -> None:
        raise Killed

    def _change(self, change: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not self._after:
            self._die()
        result = change()
        if self.left == 0:
            self._die()
        return result

    def write(self, name: str, data: bytes) -> None:
        """See `Folder.write`."""
        if name.endswith((".beat", ".left")):  # from a thread of its own, or the end of a life
            return super().write(name, data)
        self._change(lambda: super(FragileFolder, self).write(name, data))

    def create(self, name: str, data: bytes) -> bool:
        """See `Folder.create`."""
        return self._change(lambda: super(FragileFolder, self).create(name, data))

    def remove(self, name: str) -> None:
        """See `Folder.remove`."""
        self._change(lambda: super(FragileFolder, self).remove(name))


PLAIN = MergeSettings(outer_learning_rate=1.0, outer_momentum=0.0)


def merge(folder, versions, settings=PLAIN, waiting=None, **arguments):
    """Runs a merger until it has made some versions; returns their decisions.

    The clock stands still where nothing happens: a window of grace is over once it has begun.
    """
    seconds = itertools.count(step=1000.0)
    merger = Merger(
        folder if isinstance(folder, Folder) else Folder(str(folder)), settings, waiting,
        poll_seconds=1e-9, clock=lambda: next(seconds), **arguments,
    )  # fmt: skip
    made, end = [], time.monotonic() + 120.0

    def is_done() -> bool:
        assert time.monotonic() < end, f"no version came: {merger.says()}"
        return len(made) >= versions

    merger.run(is_done, made.append, sleep=lambda seconds: None)
    return made


def values_of(folder, version=None, fragments=1):
    """The outer values of a version, the newest one by default."""
    place = Folder(str(folder))
    return read_values(place, newest_version(place) if version is None else version, fragments)


def begun(folder, names, settings=PLAIN):
    """Islands that have begun with version 0."""
    toys = [Toy(folder, name, 2, wait="none") for name in names]
    with merging(folder, settings):
        return [toy.begin() for toy in toys]
