"""Walks through graphs of any kind."""

from __future__ import annotations

from typing import Callable, Iterable, Iterator, TypeVar

_T = TypeVar("_T")


def walk(starts: Iterable[_T], following: Callable[[_T], Iterable[_T]]) -> Iterator[_T]:
    """Yields all elements that are reached from `starts`, these included, each once.

    `following` gives the elements that follow one. The walk is depth first: of the elements that
    wait, the one found last comes next.
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
