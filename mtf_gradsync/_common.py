"""Helpers for all modules: text of messages, checks of arguments, logging once, graph walks."""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
import numbers
import re
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    TypeVar,
)

if TYPE_CHECKING:
    from typing_extensions import TypeGuard


def some_of(names: Sequence[str], most: int = 3) -> str:
    """Returns text such as "a, b, c and 31 more": the first `most` names, and how many others.

    Examples:
      >>> some_of(["a", "b", "c", "d", "e"])
      'a, b, c and 2 more'
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def some_lines(lines: Sequence[str], most: int = 3) -> str:
    """Returns the first `most` of `lines` as one text, which ends with how many others there are.

    Each of `lines` has to begin with a line break. The last line of the text is one such as
    "  and 31 more", and is left out if `lines` has at most `most` lines.
    """
    more = [f"\n  and {len(lines) - most} more"] if len(lines) > most else []
    return "".join([*lines[:most], *more])


def counted(names: Sequence[str], noun: str) -> str:
    """Returns text such as "34 variables: a, b, c and 31 more", or "variable a" for one name.

    `noun` says in the singular what the names are names of, such as "variable".
    """
    if len(names) == 1:
        return f"{noun} {names[0]}"
    return f"{len(names)} {noun}s: {some_of(names)}"


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a value is a real number of Python or numpy that a Python float can hold.

    A bool is no number here; infinity and NaN are numbers.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


#: The largest int32: the dtype of what a step counts.
INT32_MAX = 2**31 - 1


def is_whole_number(value: Any, least: int = 1, most: int | None = None) -> TypeGuard[int]:
    """Returns whether a value is an integer of Python or numpy, from `least` to `most`.

    A bool does not count as an integer. If `most` is None, there is no upper limit.
    """
    return (
        isinstance(value, numbers.Integral)
        and not isinstance(value, bool)
        and int(value) >= least
        and (most is None or int(value) <= most)
    )


def check_whole_number(
    name: str, value: Any, least: int = 1, more: str = "", most: int | None = INT32_MAX
) -> int:
    """Returns the value of a user's argument as a Python int, after a check.

    Raises ValueError unless `value` is a whole number from `least` to `most`, or of at least
    `least` if `most` is None. The error calls the argument `name`, and ends with the sentence
    `more`.
    """
    if not is_whole_number(value, least):
        what = f"{name} must be a whole number of {least} or more, got {value!r}."
        raise ValueError(f"{what} {more}".rstrip())
    if most is not None and value > most:
        upper = f"{most}, the largest int32" if most == INT32_MAX else str(most)
        what = f"{name} must be a whole number from {least} to {upper}, got {value!r}."
        raise ValueError(f"{what} {more}".rstrip())
    return int(value)


#: The normal numbers of float32, the dtype of what a step computes with numbers of the program.
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


def check_number(
    name: str, value: Any, what: str, below: float = math.inf, above: bool = False
) -> float:
    """Returns the value of a user's argument as a Python float, after a check.

    Raises ValueError unless `value` is a number of 0 or more (with `above`, more than 0), less than
    `below`, and in the range of float32. The error says that the argument `name` must be `what`,
    for example "a number from 0 to 1".
    """
    if not is_number(value) or not 0 <= value < below or (above and value == 0):
        raise ValueError(f"{name} must be {what}, got {value!r}.")
    if value and not FLOAT32_MIN <= value <= FLOAT32_MAX:
        raise ValueError(
            f"{name} must be a number that float32 holds, from 1.2e-38 to 3.4e+38, got {value!r}."
        )
    return float(value)


def check_flag(name: str, value: Any) -> bool:
    """Returns the value of a user's argument as a bool of Python.

    Raises TypeError, with the argument's `name`, unless `value` is a bool of Python or numpy.
    """
    if isinstance(value, bool) or (str(getattr(value, "dtype", "")) == "bool" and not value.shape):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {value!r}.")


def elements(value: Any) -> list[Any] | None:
    """Returns the elements of a list, a tuple or another iterable as a list.

    The result is None for a tensor, a string, bytes, and a value that cannot be iterated over.
    """
    # To iterate over a tensor adds operations to its graph before it fails.
    if isinstance(value, (str, bytes)) or hasattr(value, "graph"):
        return None
    try:
        return list(value)
    except TypeError:
        return None


_logger = logging.getLogger("mtf_gradsync")
_warned: set[str] = set()


def warn_once(key: str, message: str, *args: Any) -> None:
    """Logs a warning, unless one with the same `key` was logged in this process.

    `key` is any text that tells this warning from others. `message` is a format string, and `args`
    are its values, as for `logging.Logger.warning`.
    """
    log_once(key, logging.WARNING, message, *args)


def log_once(key: str, level: int, message: str, *args: Any) -> None:
    """Logs a line at a level of `logging`, unless one with the same `key` was logged before.

    `message` is a format string, and `args` are its values. Keys of lines that `warn_once` has
    logged count, too.
    """
    if key not in _warned:
        _warned.add(key)
        _logger.log(level, message, *args)


def reset_warnings() -> None:
    """Forgets which keys `warn_once` and `log_once` have logged, so that a test sees them again."""
    _warned.clear()


def close_to(given: str, names: Iterable[str], most: int = 2) -> list[str]:
    """Returns at most `most` of `names` that are similar to the name `given`, the nearest first.

    A name is similar if it contains `given`. It is also similar if the name, or one of its parts
    between slashes, is spelled almost like `given`.
    """
    wanted = _letters(given)

    def nearness(name: str) -> float:
        # "step" is far from "train_steps", by letters.
        if given in name or (wanted and wanted in _letters(name)):
            return 1.0
        parts = map(_letters, {name, *name.split("/")})
        return max(difflib.SequenceMatcher(None, wanted, part).ratio() for part in parts)

    near = [(-nearness(name), len(name), name) for name in sorted(set(names))]
    return [name for score, _, name in sorted(near) if score <= -0.6][:most]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def did_you_mean(given: str, names: Iterable[str], most: int = 2) -> str:
    """Returns the end of an error's text: "; did you mean a or b?", or "" if no name is similar.

    `given` is the unknown name, `names` are the known names, and `most` limits the suggestions.

    Examples:
      >>> did_you_mean("batc", ["batch", "heads"])
      '; did you mean batch?'
    """
    close = close_to(given, names, most)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def warn_of_unmatched(
    what: str,
    patterns: Iterable[str],
    names: Collection[str],
    matches: Callable[[str, str], Any] = re.search,
) -> None:
    """Warns once of each pattern that matches none of `names`, the names of variables.

    `what` begins the warning and says where the patterns were given. `matches(pattern, name)`
    returns a true value if a pattern matches a name.
    """
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            warn_once(
                f"unmatched {what} {pattern}",
                "%s: %r is in no name of %s%s",
                what,
                pattern,
                counted(sorted(names), "variable"),
                did_you_mean(pattern, names),
            )


_T = TypeVar("_T")


def walk(starts: Iterable[_T], following: Callable[[_T], Iterable[_T]]) -> Iterator[_T]:
    """Yields all elements that are reached from `starts`, including `starts`, each once.

    `following` returns the elements that can be reached directly from an element. The walk is depth
    first: the next element is always the one that was found last.
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


_K = TypeVar("_K", bound=Hashable)


def grouped(items: Iterable[_T], keys: Iterable[_K]) -> dict[_K, list[_T]]:
    """Returns for each key a list of the items that have it; `keys` has the key of each item.

    Examples:
      >>> grouped(["one", "two", "three"], [3, 3, 5])
      {3: ['one', 'two'], 5: ['three']}
    """
    found: dict[_K, list[_T]] = {}
    for item, key in zip(items, keys):
        found.setdefault(key, []).append(item)
    return found


@contextlib.contextmanager
def replaced(held: dict[_K, Any], values: Mapping[_K, Any]) -> Iterator[None]:
    """Returns a context in which a dictionary has the values `values` for some of its keys."""
    before = {key: held[key] for key in values}
    held.update(values)
    try:
        yield
    finally:
        held.update(before)


def map_by_key(keys: Sequence[_K], make: Callable[[_K, list[int]], Sequence[Any]]) -> list[Any]:
    """Calls `make` once for each different key; returns a result for each of `keys`, in order.

    `make(key, positions)` gets the positions at which `keys` has the key, and returns a result for
    each of them.

    Examples:
      >>> map_by_key(["a", "b", "a"], lambda key, positions: [f"{key}{i}" for i in positions])
      ['a0', 'b1', 'a2']
    """
    results: dict[int, Any] = {}
    for key, positions in grouped(range(len(keys)), keys).items():
        results.update(zip(positions, make(key, positions)))
    return [results[position] for position in range(len(keys))]


_64_BITS = (1 << 64) - 1


def mixed(seed: int, seed2: int) -> int:
    """Returns a new seed that depends on two given seeds: their hash, an int in int64's range."""
    word = 0
    for part in (seed, seed2):
        # The mixing step of splitmix64.
        word = (word + (part & _64_BITS) + 0x9E3779B97F4A7C15) & _64_BITS
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _64_BITS
        word ^= word >> 31
    return word - (1 << 64) if word >> 63 else word
