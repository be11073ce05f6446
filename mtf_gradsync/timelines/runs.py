"""What each operation in a profile did itself, and until when."""

from __future__ import annotations

import bisect
import collections
from typing import Mapping, NamedTuple, Sequence


class Ran(NamedTuple):
    """One run of an operation of a compiled program."""

    core: int  # its place among this process's cores
    execution: int  # the run of the program, from 0; -1 where the profile does not say
    operation: str  # its name in the compiled program
    begin: int  # in nanoseconds since the epoch
    end: int  # likewise; what threads have begun for others may be over earlier


def leaves(ran: Sequence[Ran], inside: Mapping[str, set[str]]) -> list[Ran]:
    """The runs without loops, branches and calls (keys of `inside`) whose operations are there."""
    seen = {one.operation for one in ran}
    around = {name for name, inner in inside.items() if inner & seen}
    return [one for one in ran if one.operation not in around]


def until_used(ran: Sequence[Ran], users: Mapping[str, set[str]]) -> list[Ran]:
    """The runs, each ended at the latest when something begins that takes its result.

    On CPU devices a thread begins an operation and others do it; a profile has its end only when a
    thread has noticed. `users` has names of operations -> names of those that take their results.
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
