"""Walks through graphs of any kind."""

from __future__ import annotations

from typing import Callable, Iterable, Iterator, TypeVar

_T = TypeVar("_T")


def walk(starts: Iterable[_T], following: Callable[[_T], Iterable[_T]]) -> Iterator[_T]:
    """Gives everything that is reached from some starts, these included, each once.

    `following` maps one element to those that follow it. What was found last comes first.
    """
    seen = dict.fromkeys(starts)
    todo = list(seen)
    while todo:
        one = todo.pop()
        yield one
        for new in following(one):
            if new not in seen:
                seen[new] = None
                todo.append(new)
