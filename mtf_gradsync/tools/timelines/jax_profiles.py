"""Reads profiles of jax: which operation of a program ran on which core, and when."""

from __future__ import annotations

import bisect
import collections
import itertools
import re
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from mtf_gradsync.tools.timelines.recording import TimelineError

_HOST = "/host:CPU"
_DEVICE = re.compile(r"^/device:[A-Z]+:(\d+)")
_DEVICE_LINES = re.compile(r"^(XLA Ops|Stream #.*)$")
_END = "end: "


class Ran(NamedTuple):
    """One run of an operation of a compiled program, on one core."""

    core: int  # its number among this process's cores
    execution: int  # the run of the program, from 0; -1 where the profile does not say
    operation: str  # its name in the compiled program
    begin: int  # in nanoseconds since the epoch
    end: int  # in nanoseconds, too; may be too late if other threads did the work


class _Found(NamedTuple):
    """A run of an operation, as a profile has it.

    `where` is the profile's name for the device, and `execution` is the profile's name for the run
    of the program. Both are None if the profile has no such names.
    """

    where: Any
    execution: Any
    operation: str
    begin: int
    end: int


def read_profile(profile: Any, module: str, ordinals: Sequence[int]) -> list[Ran]:
    """Finds the runs of a program's operations in a profile of jax; returns them in no order.

    A profile also has events that are not runs of operations, and these are left out: events of
    threads that wait, and events that only mark the end of another event.

    Args:
      profile: a ``jax.profiler.ProfileData``, or what `profile_data` returns in its place.
      module: the name of the compiled program.
      ordinals: for each of this process's cores, the number that the platform gives its device.
    """
    planes = list(profile.planes)
    began = [t for p in planes for name, t in p.stats if name == "profile_start_time"]
    start = began[0] if began else 0
    devices = [(plane, match) for plane in planes if (match := _DEVICE.match(plane.name))]
    if devices:
        found = [one for p, match in devices for one in _on_device(p, start, int(match[1]))]
        return _numbered(found, ordinals)
    host = next((p for p in planes if p.name == _HOST), None)
    if host is None:
        return []
    return _numbered(_on_host(host, start, module, len(ordinals)), ordinals)


def _events(line: Any, start: int) -> Iterator[tuple[Any, int, int]]:
    """Yields (event, begin, end) for the events of a line, in the order in which they begin.

    The times are in nanoseconds since the epoch. `line` is a line of a profile: the events of one
    thread or stream. `start` is the time at which the profile begins; some versions of jax give the
    times of events from `start`.
    """
    for event in sorted(line.events, key=lambda e: (e.start_ns, -e.duration_ns)):
        # Versions of jax count from the epoch, or from the begin of the profile.
        begin = int(event.start_ns) + (0 if event.start_ns > 10**17 else start)
        yield event, begin, begin + int(event.duration_ns)


def _stats(event: Any) -> dict[str, Any]:
    """Returns the statistics of a profile's event by name; for a repeated name its first value."""
    found: dict[str, Any] = {}
    for name, value in event.stats:
        found.setdefault(name, value)
    return found


def _on_device(plane: Any, start: int, ordinal: int) -> Iterator[_Found]:
    """Yields the runs of operations on an accelerator.

    `plane` is the part of a profile about the accelerator, and `ordinal` is the accelerator's
    number. The plane of a GPU has a line of events for each stream, and the plane of a TPU has one
    line for all operations. `start` is the time at which the profile begins, in nanoseconds.
    """
    for line in plane.lines:
        if not _DEVICE_LINES.match(line.name):
            continue
        for event, begin, end in _events(line, start):
            stats = _stats(event)
            operation = stats.get("hlo_op")
            if operation is None and line.name == "XLA Ops":
                operation = event.name.partition(" = ")[0].lstrip("%")
            if operation:
                yield _Found(ordinal, stats.get("run_id"), operation, begin, end)


def _on_host(plane: Any, start: int, module: str, cores: int) -> list[_Found]:
    """Returns the runs of operations on CPU devices: events of the threads that ran them.

    If the profile does not say which device an operation ran on, `_by_tasks` finds the device.

    Args:
      plane: the part of a profile about the host.
      start: the begin of the profile, in nanoseconds.
      module: the name of the compiled program.
      cores: how many cores this process has.
    """
    ends: dict[Any, int] = {}
    pool = _ThreadPool()
    found: list[tuple[Any, Any, list[Any], _Found]] = []
    for line in plane.lines:
        task = None
        begun: list[tuple[int, list[Any]]] = []
        for event, begin, end in _events(line, start):
            name = event.name
            if name == "ThreadpoolListener::StartRegion":
                task = _stats(event).get("_c")
            elif name == "ThreadpoolListener::StopRegion":
                pool.end(task, begin)
                task = None
            elif name == "ThreadpoolListener::Record":
                key = _stats(event).get("_p")
                pool.schedule(key, task, begin, line.name)
                for until, parts in begun:
                    if begin < until:
                        parts.append(key)
            elif name.endswith("::ExecuteHelper"):
                pool.roots.add(task)
            elif name.startswith(_END):
                # Another thread may end what a thread began.
                ends[_stats(event).get("_c")] = begin
            else:
                stats = _stats(event)
                if stats.get("hlo_module") == module and "hlo_op" in stats:
                    # A thread that ends a task of one operation goes on with the next operation.
                    pool.end(task, begin)
                    where, execution = stats.get("device_ordinal"), stats.get("run_id")
                    tasks: list[Any] = []
                    # Tasks that an operation schedules while it runs are parts of the operation.
                    begun = [(e, t) for e, t in begun if begin < e] + [(end, tasks)]
                    one = _Found(where, execution, stats["hlo_op"], begin, end)
                    found.append((task, stats.get("_p"), tasks, one))
    placed = []
    for _, producer, scheduled, one in found:
        last = max((pool.end_of(t) for t in scheduled), default=0)
        placed.append(one._replace(end=max(one.end, ends.get(producer, last))))
    if all(one.where is not None for one in placed):
        return placed
    return _by_tasks(placed, [task for task, *_ in found], pool, cores)


class _ThreadPool:
    """The tasks that ran in a thread pool: which task scheduled which, and when they ended."""

    def __init__(self) -> None:
        self.roots: set[Any] = set()  # the tasks that began a program on a device
        self.scheduled: dict[Any, tuple[int, Any]] = {}  # when, and by which thread
        self._by: dict[Any, Any] = {}
        self._ended: dict[Any, int] = {}
        self._parts: dict[Any, list[Any]] = collections.defaultdict(list)

    def schedule(self, task: Any, by: Any, at: int, thread: Any) -> None:
        """Stores that a task has scheduled another, when, and in which thread.

        Args:
          task: the scheduled task, as an identifier from the profile.
          by: the task that has scheduled it; None if no task has.
          at: the time, in nanoseconds.
          thread: the thread's name.
        """
        self._by[task], self.scheduled[task] = by, (at, thread)
        if by not in self._ended:
            self._parts[by].append(task)

    def end(self, task: Any, at: int) -> None:
        """Stores that a task ended at the time `at`, unless an end is stored already."""
        self._ended.setdefault(task, at)

    def root_of(self, task: Any) -> Any:
        """Returns the task that began the program of which `task` is a part, on one device.

        The result is None if the task that began the program is not known.
        """
        while task is not None and task not in self.roots:
            task = self._by.get(task)
        return task

    def end_of(self, task: Any) -> int:
        """Returns the time when a task and all that it scheduled had ended; 0 if not known."""
        last, pending = 0, [task]
        while pending:
            one = pending.pop()
            last = max(last, self._ended.get(one, 0))
            pending += self._parts.get(one, ())
        return last


_Place = tuple[int, int]  # number of a program's execution, and number of the device


def _by_tasks(
    found: Sequence[_Found], task_of: Sequence[Any], pool: _ThreadPool, cores: int
) -> list[_Found]:
    """Returns runs of operations with their devices and executions, found from the tasks.

    Profiles of jaxlib 0.4 do not say on which device an operation ran. A program is begun on all
    devices in the devices' order; each device has a task that begins the program. If a device's
    program has to wait, a task of another device, or of an earlier program, later goes on with the
    program. All devices run the same program. So if one task has more runs of an operation than the
    other tasks, the surplus runs belong to a device that has too few runs.

    Args:
      found: the runs.
      task_of: for each of `found`, the task that ran it.
      pool: the tasks, and which task scheduled which.
      cores: how many cores this process has.

    Raises:
      TimelineError: when the device of more than one run in a hundred cannot be found.
    """
    if cores == 1:
        return [one._replace(where=0, execution=None) for one in found]
    begun = sorted(pool.roots - {None}, key=lambda root: pool.scheduled.get(root, (0, "")))
    place = {root: divmod(number, cores) for number, root in enumerate(begun)}
    runs: dict[str, list[tuple[_Place | None, _Found]]] = {}
    for one, task in sorted(zip(found, task_of), key=lambda pair: pair[0].begin):
        runs.setdefault(one.operation, []).append((place.get(pool.root_of(task)), one))
    places = sorted(place.values())
    by_place: dict[_Place, list[_Found]] = {p: [] for p in places}
    in_branches = []
    for of_operation in runs.values():
        turns = min(collections.Counter(p for p, _ in of_operation if p).values(), default=0)
        if len(of_operation) == turns * len(places):
            _share_out(of_operation, turns, places, by_place)
        else:
            in_branches.append(of_operation)
    began = {p: min(one.begin for one in ran) for p, ran in by_place.items() if ran}
    for of_operation in in_branches:
        for trusts_tasks in (True, False):
            likely, taken = _of_some_programs(of_operation, began, trusts_tasks)
            turns = max(len(likely) // max(cores * len(taken), 1), 1)
            if len(likely) == turns * cores * len(taken):
                break
        _share_out(likely, turns, [p for p in places if p[0] in taken], by_place)
    placed = [
        one._replace(where=core, execution=execution)
        for (execution, core), ran in by_place.items()
        for one in ran
    ]
    if len(begun) % cores or len(placed) < 0.99 * len(found):
        import jax

        raise TimelineError(
            f"The profile of jax {jax.__version__} does not say on which device operations ran "
            f"({len(found) - len(placed)} of {len(found)}, in {len(begun)} programs on {cores} "
            "devices). jax 0.10 does: install a newer one."
        )
    return placed


def _of_some_programs(
    of_operation: Sequence[tuple[_Place | None, _Found]],
    began: dict[_Place, int],
    trusts_tasks: bool,
) -> tuple[list[tuple[_Place | None, _Found]], set[int]]:
    """Finds the executions of a program in which an operation of a branch has run.

    A run belongs to the execution that the run's task began, unless the next execution on the same
    device began before the run. If the execution of the task is not known, or if `trusts_tasks` is
    False, the run belongs to the last execution that began before the run.

    Args:
      of_operation: the runs of the operation, each after the place of its task: the number of the
        execution and the number of the device. The place is None if it is not known.
      began: for each place, when the execution began there.
      trusts_tasks: whether to go by the task of a run.

    Returns:
      The runs of the operation, each after its likely place or None, and the numbers of the
      executions.
    """
    likely, taken = [], set()
    in_order = sorted(began, key=began.__getitem__)
    begins = [began[place] for place in in_order]
    for at, one in of_operation:
        if at and one.begin >= began.get((at[0] + 1, at[1]), one.begin + 1):
            at = None
        execution = at[0] if at else None
        before = bisect.bisect_right(begins, one.begin)
        if before and not (at and trusts_tasks):
            execution = in_order[before - 1][0]
        if execution is not None:
            taken.add(execution)
        likely.append((at if at and at[0] == execution else None, one))
    return likely, taken


def _share_out(
    of_operation: Sequence[tuple[_Place | None, _Found]],
    turns: int,
    places: Sequence[_Place],
    by_place: dict[_Place, list[_Found]],
) -> None:
    """Gives each place equally many runs of an operation: its likely own runs, then left ones.

    A place is a pair: the number of a program's execution and the number of a device.

    Args:
      of_operation: the runs in the order in which they began, each after its likely place or None.
      turns: how many runs each place gets.
      places: the places to give the runs to.
      by_place: the runs of each place, to which these runs are added.
    """
    own: dict[_Place, list[_Found]] = {p: [] for p in places}
    others: list[_Found] = []
    for at, one in of_operation:
        if at is not None and at in own and len(own[at]) < turns:
            own[at].append(one)
        else:
            others.append(one)
    left = iter(others)
    for at in places:
        by_place[at] += [*own[at], *itertools.islice(left, turns - len(own[at]))]


def _numbered(found: Sequence[_Found], ordinals: Sequence[int]) -> list[Ran]:
    """Returns runs with numbers of cores and of executions in place of the profile's names.

    `ordinals` has, for each of this process's cores, the number that the platform gives the core's
    device. Runs on devices that are not in `ordinals` are left out. Executions are numbered in the
    order in which they begin.
    """
    seen = {one.where for one in found}
    names = list(ordinals)
    if not seen <= set(names):
        # Numbers in their order: each process may count its devices from 0 in a profile.
        names = [sorted(ordinals).index(o) for o in ordinals]
    core_of = {name: core for core, name in enumerate(names)}
    first: dict[Any, int] = {}
    for one in found:
        first[one.execution] = min(first.get(one.execution, one.begin), one.begin)
    known = sorted((e for e in first if e is not None), key=first.__getitem__)
    number: dict[Any, int] = collections.defaultdict(lambda: -1)
    number.update({execution: i for i, execution in enumerate(known)})
    return [
        Ran(core_of[one.where], number[one.execution], one.operation, one.begin, one.end)
        for one in found
        if one.where in core_of
    ]


def leaves(ran: Sequence[Ran], inside: Mapping[str, set[str]]) -> list[Ran]:
    """Returns the runs of operations, without those of loops, branches and calls.

    `inside` has, for the name of each loop, branch or call, the names of the operations in it. If
    none of these operations ran, the runs of the loop, branch or call are kept.
    """
    seen = {one.operation for one in ran}
    around = {name for name, inner in inside.items() if inner & seen}
    return [one for one in ran if one.operation not in around]


def until_used(ran: Sequence[Ran], users: Mapping[str, set[str]]) -> list[Ran]:
    """Returns the runs, each cut off when the first operation that uses its result begins.

    On a CPU device, one thread begins an operation and other threads compute the result. In a
    profile the run of the operation ends only when the thread that began the operation has noticed
    that the result is computed. The keys of `users` are the names of operations; each value has the
    names of the operations that use the operation's result.
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
    """Returns the names of the first operations in a profile that use an operation's result.

    If an operation that uses the result is not in the profile, it counts as one that took no time.
    In place of such an operation, the operations that use its own result count as users.

    Args:
      name: the operation's name.
      users: by the name of an operation, the names of the operations that take its result.
      seen: the names of the operations that the profile has.
    """
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
