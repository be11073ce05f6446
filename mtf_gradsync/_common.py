"""What all rooms use: names in messages, checks of numbers, lines that are logged once, walks."""

from __future__ import annotations

import logging
import numbers
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Sequence, TypeVar

if TYPE_CHECKING:
    from typing_extensions import TypeGuard


def some_of(names: Sequence[str], most: int = 3) -> str:
    """Text such as "a, b, c and 31 more": the first names of many, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def some_lines(lines: Sequence[str], most: int = 3) -> str:
    """The first lines of many, each with its line break in front, and how many more there are."""
    more = [f"\n  and {len(lines) - most} more"] if len(lines) > most else []
    return "".join([*lines[:most], *more])


def counted(names: Sequence[str], noun: str) -> str:
    """Text such as "34 variables: a, b, c and 31 more", or "variable a"; `noun` is singular."""
    if len(names) == 1:
        return f"{noun} {names[0]}"
    return f"{len(names)} {noun}s: {some_of(names)}"


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a value is a real number, Python's or numpy's."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole_number(value: Any, least: int = 1) -> TypeGuard[int]:
    """Returns whether a value is a whole number, Python's or numpy's, of at least `least`."""
    return (
        isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least
    )


def check_whole_number(name: str, value: Any, least: int = 1, more: str = "") -> None:
    """Raises ValueError unless an argument is a whole number of at least `least`.

    `more` is a sentence for the end of the error.
    """
    if not is_whole_number(value, least):
        what = f"{name} must be a whole number of {least} or more, got {value!r}."
        raise ValueError(f"{what} {more}".rstrip())


_logger = logging.getLogger("mtf_gradsync")
_warned: set[str] = set()


def warn_once(key: str, message: str, *args: Any) -> None:
    """Logs a warning unless one with the same key was logged in this process."""
    log_once(key, logging.WARNING, message, *args)


def log_once(key: str, level: int, message: str, *args: Any) -> None:
    """Logs a line at a level of `logging`, as `warn_once` logs a warning."""
    if key not in _warned:
        _warned.add(key)
        _logger.log(level, message, *args)


def reset_warnings() -> None:
    """Forgets which warnings were logged, for tests."""
    _warned.clear()


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
