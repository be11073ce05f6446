"""What is recorded of steps: calls, exchanges and waits; and what all recorders do."""

from __future__ import annotations

import abc
import bisect
import collections
import dataclasses
import json
import re
import time
from typing import (
    AbstractSet,
    Any,
    Callable,
    Iterable,
    Literal,
    Mapping,
    NamedTuple,
    Sequence,
    Tuple,
)

from mtf_gradsync.extension import STAND_INS, tf
from mtf_gradsync.runtimes.simd.traffic import CommunicationRow
from mtf_gradsync.runtimes.xla.collectives import COLLECTIVES, HloCollective, collectives_of
from mtf_gradsync.runtimes.xla.hlo import read_module
from mtf_gradsync.runtimes.xla.replica_program import ReplicaProgram


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


def covered(intervals: Iterable[Interval]) -> list[Interval]:
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
    keys = tf.GraphKeys
    collections = (keys.GLOBAL_VARIABLES, keys.LOCAL_VARIABLES, STAND_INS, keys.TRAINABLE_VARIABLES)
    *all_names, trained = ({v.op.name for v in graph.get_collection(key)} for key in collections)
    others = set().union(*all_names) - trained
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


_AROUND_OTHERS = ("while", "conditional", "call")
# "x/(a:b)" is what a compiler makes of x/a and x/b, and "(a:b)" what packs a and b.
_MERGED = re.compile(r"^([^()]*)\(([^()]*)\)$")


class Operations(NamedTuple):
    """The operations of compiled programs, by their names there where nothing else is said."""

    name: dict[str, str]  # the name in the model's graph, where it is known
    collective: set[str]
    inside: dict[str, set[str]]  # of loops, branches and calls: the operations in them
    users: dict[str, set[str]]  # the operations that take a result
    facts: dict[str, Collective]  # by names in the model's graph


def operations_of(
    programs: Iterable[tuple[bytes, ReplicaProgram]], rows: Sequence[CommunicationRow]
) -> Operations:
    """Reads compiled programs; `rows` are the list of their collectives.

    A program is a serialized ``HloModuleProto``, with the core's program that it was made of.
    """
    found = Operations({}, set(), {}, {}, {})
    by_name = {row.name: row for row in rows}
    for hlo, replica in programs:
        module = read_module(hlo)
        exchanges = {c.name: c for c in collectives_of(module)}
        nodes = {node.name for node in replica.graph_def.node}
        for instruction in module.instructions:
            for operand in instruction.operands:
                found.users.setdefault(operand.name, set()).add(instruction.name)
            called = instruction.called
            name = instruction.proto.metadata.op_name
            if not name and called and called[0].root is not None:
                name = called[0].root.proto.metadata.op_name
            shown = _name(name, nodes) or instruction.name
            found.name[instruction.name] = shown
            if instruction.operation in COLLECTIVES:
                found.collective.add(instruction.name)
                # What begins and ends apart has its bytes where it begins.
                if instruction.name in exchanges or shown not in found.facts:
                    exchange = exchanges.get(instruction.name)
                    found.facts[shown] = _facts(_parts(name, nodes), exchange, by_name)
            if instruction.opcode in _AROUND_OTHERS:
                inner = {one.name for computation in called for one in computation.instructions}
                found.inside.setdefault(instruction.name, set()).update(inner)
    return found


def _name(name: str, nodes: AbstractSet[str] = frozenset()) -> str:
    """A name as the model's graph has it."""
    names = [model_name(part) for part in _parts(name, nodes)]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _parts(name: str, nodes: AbstractSet[str] = frozenset()) -> list[str]:
    match = _MERGED.match(name)
    parts = [match[1] + part for part in match[2].split(":")] if match else [name]
    return [_node(part, nodes) for part in parts]


def _node(name: str, nodes: AbstractSet[str]) -> str:
    """The node of a name, which begins with the branches and loops around it: cond/cond_1/node."""
    rest = name
    while rest and rest not in nodes:
        rest = rest.partition("/")[2]
    return rest or name


def _facts(
    parts: Sequence[str], exchange: HloCollective | None, rows: dict[str, Any]
) -> Collective:
    known = [rows[part] for part in parts if part in rows]
    variables = None
    if known and all(row.variables is not None for row in known):
        variables = tuple(dict.fromkeys(v for row in known for v in row.variables))
    if exchange is None:
        return Collective(None, variables)
    return Collective(exchange.bytes_per_core, variables, exchange.is_conditional)
