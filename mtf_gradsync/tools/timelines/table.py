"""The table of where the recorded steps' time went, by core and by operation."""

from __future__ import annotations

import collections
import dataclasses
import json
from typing import Iterable, Sequence, Tuple

from mtf_gradsync.extension import some_of
from mtf_gradsync.runtimes._tables import text_table
from mtf_gradsync.tools.timelines.recording import Event, Kind, Recording, Step, TimelineError

_SHOWN = 10
_MS = 1e-6


@dataclasses.dataclass(frozen=True)
class CoreTimes:
    """The times of a core in an average step, in milliseconds.

    `compute`, `exposed`, `host` and `idle` add up to `step`.

    Attributes:
      core: the core's name; "all" for the mean over the cores.
      step: how long a step is.
      compute: the time in which the core runs an operation that is no collective.
      collectives: the time in which the core runs a collective, alone or beside other operations.
      exposed: the time in which the core runs a collective and nothing else.
      host: the time in which no core of the process runs anything: all wait for the host.
      idle: the time in which this core runs nothing, but another core of the process does.
    """

    core: str
    step: float
    compute: float
    collectives: float
    exposed: float
    host: float
    idle: float


@dataclasses.dataclass(frozen=True)
class OperationTimes:
    """The time of an operation in an average step.

    Attributes:
      name: the operation's name.
      kind: "compute" or "collective".
      milliseconds: how long a core takes for all runs of the operation in a step.
      runs: how often a core runs the operation in a step.
    """

    name: str
    kind: Kind
    milliseconds: float
    runs: float


@dataclasses.dataclass(frozen=True)
class CollectiveTimes:
    """The time of a collective in an average step.

    Attributes:
      name: the collective's name.
      bytes_per_core: bytes that a core gives to the collective at each run (on a placement mesh:
        bytes that it receives); None if unknown.
      variables: the variables into whose values the collective's result goes; None if unknown.
      milliseconds: how long a core takes for all runs of the collective in a step.
      exposed: the part of `milliseconds` in which the core runs nothing else.
      runs: how often a core runs the collective in a step.
    """

    name: str
    bytes_per_core: int | None
    variables: tuple[str, ...] | None
    milliseconds: float
    exposed: float
    runs: float


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of where the time of the recorded steps went.

    Attributes:
      runtime: "placement_mesh", "cpu_replicas" or "xla".
      steps: how many steps were recorded.
      update_steps: how many of the steps updated the variables; None if that is not known.
      cores: the times of the cores of all processes.
      total: the mean over the cores.
      update: the mean over the cores in steps that updated the variables; None if the steps are all
        of one kind, or their kind is not known.
      other: the mean over the cores in steps that did not update the variables; None if `update` is
        None.
      operations: the ten operations that take longest.
      collectives: the ten collectives with the most bytes.
    """

    runtime: str
    steps: int
    update_steps: int | None
    cores: tuple[CoreTimes, ...]
    total: CoreTimes
    update: CoreTimes | None
    other: CoreTimes | None
    operations: tuple[OperationTimes, ...]
    collectives: tuple[CollectiveTimes, ...]

    def to_json(self) -> str:
        """Returns the table as JSON text: an object whose keys are the attributes' names."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Table:
        """Reads a table from a text of `to_json`; keys that are no attributes are ignored.

        Raises:
          TimelineError: when `text` was not made by `to_json`.
        """
        try:
            content = json.loads(text)
            for name in ("total", "update", "other"):
                content[name] = content[name] and CoreTimes(**content[name])
            for name, kind in (("cores", CoreTimes), ("operations", OperationTimes)):
                content[name] = tuple(kind(**one) for one in content[name])
            content["collectives"] = tuple(
                CollectiveTimes(
                    **{**one, "variables": one["variables"] and tuple(one["variables"])}
                )
                for one in content["collectives"]
            )
            return cls(**{field.name: content[field.name] for field in dataclasses.fields(cls)})
        except (KeyError, TypeError, ValueError) as error:
            raise TimelineError(
                "This text is no table of a timeline that Table.to_json made."
            ) from error

    def __str__(self) -> str:
        return "\n".join(_lines(self))


# Begin and end, in nanoseconds; the end is not part of it.
Interval = Tuple[int, int]


def covered(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of intervals, as a sorted list of intervals that do not touch each other.

    Examples:
      >>> covered([(3, 5), (1, 4), (7, 8)])
      [(1, 5), (7, 8)]
    """
    found: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[0] < i[1]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(intervals: Sequence[Interval]) -> int:
    """Returns the sum of the lengths of intervals, in nanoseconds."""
    return sum(end - begin for begin, end in intervals)


def minus(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Returns the parts of some intervals that other intervals do not cover, as intervals.

    The lists `intervals` and `others` must be in order, and no two intervals of a list may touch
    each other; the function `covered` returns such lists.

    Examples:
      >>> minus([(0, 10)], [(2, 3), (5, 20)])
      [(0, 2), (3, 5)]
    """
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
    """Returns how many nanoseconds two lists of intervals have in common.

    The lists `intervals` and `others` must be in order, and no two intervals of a list may touch
    each other; the function `covered` returns such lists.

    Examples:
      >>> shared([(0, 10)], [(2, 3), (5, 20)])
      6
    """
    return length(intervals) - length(minus(intervals, others))


def tabulate_times(recordings: Sequence[Recording]) -> Table:
    """Computes the table of where the time of recorded steps went.

    `recordings` has the recording of each process. The caller must have checked all recordings by
    `check_recorded`.
    """
    spent = [_WorkIntervals(recording) for recording in recordings]
    cores = tuple(times for one in spent for times in one.times(one.recording.steps))
    known = [step.is_update for step in recordings[0].steps]
    mixed = None not in known and len(set(known)) == 2
    return Table(
        runtime=recordings[0].runtime,
        steps=len(known),
        update_steps=None if None in known else sum(map(bool, known)),
        cores=cores,
        total=_mean(cores),
        update=_mean_of(spent, is_update=True) if mixed else None,
        other=_mean_of(spent, is_update=False) if mixed else None,
        operations=_longest(recordings),
        collectives=_largest(spent),
    )


class _WorkIntervals:
    """The intervals in which each core of a process worked.

    Times at which several operations ran at once count once.
    """

    def __init__(self, recording: Recording):
        self.recording = recording
        found: dict[tuple[int, Kind], list[Interval]] = collections.defaultdict(list)
        for event in recording.events:
            found[event.core, event.kind].append((event.begin, event.end))
        self.compute = {c: covered(found[c, "compute"]) for c in recording.cores}
        self._collectives = {c: covered(found[c, "collective"]) for c in recording.cores}
        self._busy = {
            c: covered([*self.compute[c], *self._collectives[c]]) for c in recording.cores
        }
        self._any = covered(i for busy in self._busy.values() for i in busy)

    def times(self, steps: Sequence[Step]) -> list[CoreTimes]:
        """Returns the times of each core, as means over `steps`."""
        return [self._times_of(steps, core) for core in self.recording.cores]

    def _times_of(self, steps: Sequence[Step], core: int) -> CoreTimes:
        exposed = minus(self._collectives[core], self.compute[core])
        # Steps do not overlap.
        times = covered((s.begin, s.end) for s in steps)

        def mean(intervals: Sequence[Interval]) -> float:
            return shared(intervals, times) * _MS / len(steps)

        step = length(times) * _MS / len(steps)
        return CoreTimes(
            core=self.recording.cores[core],
            step=step,
            compute=mean(self.compute[core]),
            collectives=mean(self._collectives[core]),
            exposed=mean(exposed),
            host=step - mean(self._any),
            idle=mean(minus(self._any, self._busy[core])),
        )


def _mean(cores: Sequence[CoreTimes]) -> CoreTimes:
    fields = [f.name for f in dataclasses.fields(CoreTimes) if f.name != "core"]
    means = {f: sum(getattr(one, f) for one in cores) / len(cores) for f in fields}
    return CoreTimes(core="all", **means)


def _mean_of(spent: Sequence[_WorkIntervals], is_update: bool) -> CoreTimes:
    found = []
    for one in spent:
        steps = [step for step in one.recording.steps if step.is_update is is_update]
        if steps:
            found += one.times(steps)
    return _mean(found)


def _in_steps(recording: Recording) -> list[Event]:
    begin, end = recording.steps[0].begin, recording.steps[-1].end
    return [e for e in recording.events if begin < e.end and e.begin < end]


def _longest(recordings: Sequence[Recording]) -> tuple[OperationTimes, ...]:
    sums: dict[tuple[str, Kind], list[int]] = collections.defaultdict(lambda: [0, 0])
    for event in (e for recording in recordings for e in _in_steps(recording)):
        total = sums[event.name, event.kind]
        total[0] += event.end - event.begin
        total[1] += 1
    count = _core_steps(recordings)
    rows = [
        OperationTimes(name, kind, spent * _MS / count, runs / count)
        for (name, kind), (spent, runs) in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.milliseconds)[:_SHOWN])


def _largest(spent: Sequence[_WorkIntervals]) -> tuple[CollectiveTimes, ...]:
    recordings = [one.recording for one in spent]
    facts = {name: c for r in recordings for name, c in r.collectives.items()}
    # Name -> place in `spent`, and core -> when it ran.
    found: dict[str, dict[tuple[int, int], list[Interval]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for place, recording in enumerate(recordings):
        for event in _in_steps(recording):
            if event.kind == "collective":
                found[event.name][place, event.core].append((event.begin, event.end))
    runs = {name: [i for one in found[name].values() for i in one] for name in found}
    names = sorted(
        found,
        key=lambda name: (
            -((facts[name].bytes_per_core or 0) if name in facts else 0),
            -length(runs[name]),
        ),
    )
    count = _core_steps(recordings)
    rows = []
    for name in names[:_SHOWN]:
        exposed = sum(
            length(minus(covered(times), spent[place].compute[core]))
            for (place, core), times in found[name].items()
        )
        known = facts.get(name)
        rows.append(
            CollectiveTimes(
                name=name,
                bytes_per_core=known.bytes_per_core if known else None,
                variables=known.variables if known else None,
                milliseconds=length(runs[name]) * _MS / count,
                exposed=exposed * _MS / count,
                runs=len(runs[name]) / count,
            )
        )
    return tuple(rows)


def _core_steps(recordings: Sequence[Recording]) -> int:
    return sum(len(r.cores) * len(r.steps) for r in recordings)


def _lines(table: Table) -> list[str]:
    """Returns the lines of the table as text."""
    updates = table.update_steps
    kinds = "" if updates is None else f", {updates} of them with an update"
    lines = [f"{table.steps} steps{kinds}; milliseconds of an average step", ""]
    rows = [dataclasses.astuple(one) for one in (*table.cores, table.total)]
    for name, one in (("all, update", table.update), ("all, other", table.other)):
        if one is not None:
            rows.append((name, *dataclasses.astuple(one)[1:]))
    head = [f.name for f in dataclasses.fields(CoreTimes)]
    lines += text_table(head, [(row[0], *map(_number, row[1:])) for row in rows], ["core"])
    lines += ["", "compute + exposed + host + idle = step; collectives: hidden ones, too", ""]
    lines.append("longest operations (milliseconds of a core in a step)")
    lines += text_table(
        ["operation", "kind", "ms", "runs"],
        [(o.name, o.kind, _number(o.milliseconds), _number(o.runs)) for o in table.operations],
        ["operation", "kind"],
    )
    lines += ["", "largest collectives (milliseconds of a core in a step)"]
    lines += text_table(
        ["collective", "bytes/core", "ms", "exposed", "runs", "variables"],
        [
            (
                one.name,
                "?" if one.bytes_per_core is None else f"{one.bytes_per_core:,}",
                *map(_number, (one.milliseconds, one.exposed, one.runs)),
                "?" if one.variables is None else some_of(one.variables, most=2),
            )
            for one in table.collectives
        ],
        ["collective", "variables"],
    )
    return lines


def _number(value: float) -> str:
    return f"{value:.3f}"
