"""What a recording holds: operations, steps and collectives, with their times."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import json
import re
from typing import Any, Iterable, Literal, Mapping, NamedTuple, Sequence, Tuple


class TimelineError(RuntimeError):
    """Nothing can be said of where the time goes; the message says what to do."""


Kind = Literal["compute", "collective"]

_FORMAT = "mtf_gradsync timeline 1"
# Mesh-TF's name scope of a processor's part of an operation.
_PARALLEL = re.compile(r"(^|/)parallel_\d+(_\d+)*(?=/|$)")


@dataclasses.dataclass(frozen=True)
class Event:
    """One run of an operation on a core.

    Attributes:
      core: the core's number.
      name: of the operation, as the model's graph has it where that is known.
      kind: "compute", or "collective" for what takes values from other cores.
      begin: when it began, in nanoseconds since the epoch.
      end: when it ended.
    """

    core: int
    name: str
    kind: Kind
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """What is known of a collective from the program.

    Attributes:
      bytes_per_core: what a core puts in, or receives on a placement mesh; None where unknown.
      variables: whose values its result becomes part of; None where unknown.
      is_conditional: whether it stands in a branch, as the sums of an update do that is not made
        on every step.
    """

    bytes_per_core: int | None = None
    variables: tuple[str, ...] | None = None
    is_conditional: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """A step, from the end of the one before to its own end.

    Attributes:
      begin: in nanoseconds since the epoch.
      end: likewise.
      is_update: whether it updated the variables; None where that is not known.
    """

    begin: int
    end: int
    is_update: bool | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    """Something that the host did.

    Attributes:
      name: what.
      begin: in nanoseconds since the epoch.
      end: likewise.
    """

    name: str
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Recording:
    """What one process has recorded.

    Attributes:
      runtime: "placement_mesh", "cpu_replicas" or "xla".
      process: the process's number.
      cores: names of its cores by their numbers.
      steps: in order; each begins where the one before ends.
      events: what its cores did.
      collectives: of the program, by the names of their events.
      calls: what its host did.
    """

    runtime: str
    process: int
    cores: dict[int, str]
    steps: tuple[Step, ...]
    events: tuple[Event, ...]
    collectives: dict[str, Collective]
    calls: tuple[Call, ...] = ()

    def to_json(self) -> str:
        """The recording as text, for `from_json` on another machine."""
        content: dict[str, Any] = {"format": _FORMAT}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("steps", "events", "calls"):
                value = [list(dataclasses.astuple(one)) for one in value]
            elif field.name == "collectives":
                value = {name: dataclasses.astuple(one) for name, one in value.items()}
            content[field.name] = value
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Recording:
        """The inverse of `to_json`.

        Raises:
          TimelineError: when it is no such text.
        """
        try:
            content = json.loads(text)
            if content.pop("format") != _FORMAT:
                raise ValueError
            return cls(
                runtime=content["runtime"],
                process=content["process"],
                cores={int(core): name for core, name in content["cores"].items()},
                steps=tuple(Step(*one) for one in content["steps"]),
                events=tuple(Event(*one) for one in content["events"]),
                collectives={
                    name: Collective(size, None if of is None else tuple(of), conditional)
                    for name, (size, of, conditional) in content["collectives"].items()
                },
                calls=tuple(Call(*one) for one in content["calls"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TimelineError(
                "This is no part of a timeline. `mtf-gradsync timeline` writes one in each "
                "process, beside the trace, with .part in its name."
            ) from error


def model_name(name: str) -> str:
    """An operation's name without the processor whose part it is."""
    return _PARALLEL.sub("", name).lstrip("/") or name


def check_recorded(recording: Recording, advice: str) -> Recording:
    """Checks that a recording has operations of every core; an error ends with `advice`."""
    if not recording.steps:
        raise TimelineError(
            "No step was made while the timeline was recorded. Make some inside the `with` block, "
            "by session.run of what trains, after one step before it."
        )
    begin, end = recording.steps[0].begin, recording.steps[-1].end
    seen = {event.core for event in recording.events if begin < event.end and event.begin < end}
    missing = [name for core, name in recording.cores.items() if core not in seen]
    if missing or not recording.cores:
        which = f"of {', '.join(missing[:4])}" if missing else "of a core"
        raise TimelineError(
            f"The profile has no operation {which} in {len(recording.steps)} steps, so nothing can "
            f"be said of where the time goes. {advice}"
        )
    return recording


# Begin and end, in nanoseconds; the end is not part of it.
Interval = Tuple[int, int]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that intervals in any order cover, as intervals in order that do not touch."""
    found: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[0] < i[1]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(intervals: Sequence[Interval]) -> int:
    """The sum of how long intervals are, in nanoseconds."""
    return sum(end - begin for begin, end in intervals)


def minus(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The time that merged intervals cover and others, merged too, do not."""
    found = []
    position = 0
    for begin, end in intervals:
        while position < len(others) and others[position][1] <= begin:
            position += 1
        at, next_one = begin, position
        while next_one < len(others) and others[next_one][0] < end:
            if at < others[next_one][0]:
                found.append((at, others[next_one][0]))
            at = max(at, others[next_one][1])
            next_one += 1
        if at < end:
            found.append((at, end))
    return found


def shared(intervals: Sequence[Interval], others: Sequence[Interval]) -> int:
    """How long merged intervals and others, merged too, are at the same time, in nanoseconds."""
    return length(intervals) - length(minus(intervals, others))


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
