"""Makes of a profile's runs of operations what each of them did itself."""

from __future__ import annotations

import bisect
import collections
from typing import Mapping, NamedTuple, Sequence


class Ran(NamedTuple):
    """One run of an operation of a compiled program.

    Attributes:
      core: which of this process's cores it was, by its place among them.
      execution: which run of the program it belongs to, counted from 0; -1 where the profile does
        not say.
      operation: its name in the compiled program.
      begin: in nanoseconds since the epoch.
      end: likewise; what threads have begun for others may be over earlier.
    """

    core: int
    execution: int
    operation: str
    begin: int
    end: int


def leaves(ran: Sequence[Ran], inside: Mapping[str, set[str]]) -> list[Ran]:
    """Without loops, branches and calls whose operations are there themselves.

    Args:
      ran: runs of operations.
      inside: names of loops, branches and calls -> those of the operations in them.
    """
    seen = {one.operation for one in ran}
    around = {name for name, inner in inside.items() if inner & seen}
    return [one for one in ran if one.operation not in around]


def until_used(ran: Sequence[Ran], users: Mapping[str, set[str]]) -> list[Ran]:
    """The same, each ended at the latest when something begins that takes its result.

    On CPU devices a thread begins an operation and others do it. That it is over is in the profile
    when a thread has noticed.

    Args:
      ran: runs of operations.
      users: names of operations -> those of the operations that take their results.
    """
    seen = {one.operation for one in ran}
    begins: dict[tuple[int, int, str], list[int]] = collections.defaultdict(list)
    for one in sorted(ran, key=lambda one: one.begin):
        begins[one.core, one.execution, one.operation].append(one.begin)
    next_seen = {name: _first_seen(name, users, seen) for name in seen}
    found = []
    for one in ran:
        end = one.end
        for user in next_seen[one.operation]:
            times = begins[one.core, one.execution, user]
            at = bisect.bisect_right(times, one.begin)
            if at < len(times):
                end = min(end, times[at])
        found.append(one._replace(end=max(end, one.begin + 1)))
    return found


def _first_seen(name: str, users: Mapping[str, set[str]], seen: set[str]) -> set[str]:
    """What uses an operation's result, through operations that take no time."""
    found: set[str] = set()
    passed: set[str] = set()
    pending = list(users.get(name, ()))
    while pending:
        user = pending.pop()
        if user in seen:
            found.add(user)
        elif user not in passed:
            passed.add(user)
            pending += users.get(user, ())
    return found
