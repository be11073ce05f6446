"""What records the steps of one runtime."""

from __future__ import annotations

import abc
import time
from typing import Any, Callable, Iterable, Mapping

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
    collectives: Mapping[str, Collective],
) -> tuple[Step, ...]:
    """Steps, from when the first one began and each of them ended.

    A step updated the variables if it ran a collective of a branch whose result becomes part of
    them. Where no collective is of that kind it is not known.
    """
    moments = [begin, *sorted(ends)]
    of_updates = {name for name, c in collectives.items() if c.is_conditional and c.variables != ()}
    at = sorted(e.begin for e in events if e.name in of_updates)

    def is_update(first: int, last: int) -> bool | None:
        return any(first <= moment < last for moment in at) if of_updates else None

    return tuple(Step(a, b, is_update(a, b)) for a, b in zip(moments, moments[1:]))


def timed(calls: list[Call], name: str, work: Callable[[], Any]) -> Any:
    """Does something, and adds to a list that the host did it."""
    began = now()
    try:
        return work()
    finally:
        calls.append(Call(name, began, now()))
