"""What records the steps of one runtime."""

from __future__ import annotations

import abc
import bisect
import time
from typing import AbstractSet, Any, Callable, Iterable, Mapping

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.timelines.events import Call, Collective, Event, Recording, Step


class Recorder(abc.ABC):
    """Records steps between `start` and `stop`."""

    @abc.abstractmethod
    def start(self) -> None:
        """Begins."""

    @abc.abstractmethod
    def stop(self) -> list[Recording]:
        """Ends, and returns what each process recorded; the session is as it was before."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Ends without a recording."""


class Replaced:
    """A method of one object, replaced until it is put back: what is not recorded costs nothing."""

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]):
        """Puts what `make` returns for the bound method in the method's place."""
        self._owner, self._name = owner, name
        # Not None where another recording has replaced it.
        self._own = vars(owner).get(name)
        setattr(owner, name, make(getattr(owner, name)))

    def put_back(self) -> None:
        """Puts the method back."""
        if self._own is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)


def now() -> int:
    """Nanoseconds since the epoch, as profiles count."""
    return time.time_ns()


def steps_until(
    begin: int,
    ends: Iterable[int],
    events: Iterable[Event],
    of_updates: AbstractSet[str],
) -> tuple[Step, ...]:
    """Steps, from when the first one began and each of them ended.

    A step updated the variables if it ran one of `of_updates`. Without any it is not known.
    """
    moments = [begin, *sorted(ends)]
    at = sorted(e.begin for e in events if e.name in of_updates)

    def is_update(first: int, last: int) -> bool | None:
        ran = bisect.bisect_left(at, first) < bisect.bisect_left(at, last)
        return ran if of_updates else None

    return tuple(Step(a, b, is_update(a, b)) for a, b in zip(moments, moments[1:]))


def sums_of_updates(collectives: Mapping[str, Collective], graph: tf.Graph) -> set[str]:
    """The collectives in branches whose results become part of what the program trains.

    A wrapper's own values are not that: it may sum some in the steps that make no update.
    """
    collections = ("GLOBAL_VARIABLES", "LOCAL_VARIABLES", "TRAINABLE_VARIABLES")
    everywhere, here, trained = (
        {v.op.name for v in graph.get_collection(getattr(tf.GraphKeys, name))}
        for name in collections
    )
    others = (everywhere | here) - trained
    return {
        name
        for name, one in collectives.items()
        if one.is_conditional and set(one.variables or ()) - others
    }


def timed(calls: list[Call], name: str, work: Callable[[], Any]) -> Any:
    """Does something, and adds to a list that the host did it."""
    began = now()
    try:
        return work()
    finally:
        calls.append(Call(name, began, now()))
