"""Reads profiles of jax: which operation of a program ran on which core, and when."""

from __future__ import annotations

import bisect
import collections
import itertools
import re
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from mtf_gradsync.extension import walk
from mtf_gradsync.tools.timelines.recording import TimelineError

_HOST = "/host:CPU"
_DEVICE = re.compile(r"^/device:[A-Z]+:(\d+)")
_DEVICE_LINES = re.compile(r"^(XLA Ops|Stream #.*)$")
_END = "end: "


class OperationRun(NamedTuple):
    """One run of an operation of a compiled program, on one core."""

    core: int  # its number among this process's cores
    execution: int  # the run of the program, from 0; -1 where the profile does not say
    operation: str  # its name in the compiled program
    begin: int  # in nanoseconds since the epoch
    end: int  # in nanoseconds, too; may be too late if other threads did the work


class _ProfiledRun(NamedTuple):
    """One run of an operation, as a profile describes it.

    `where` is the profile's identifier of the device, and `execution` its identifier of the run of
    the program. Each is None if the profile does not say it.
    """

    where: Any
    execution: Any
    operation: str
    begin: int
    end: int


def read_profile(profile: Any, module: str, ordinals: Sequence[int]) -> list[OperationRun]:
    """Finds the runs of a program's operations in a profile of jax; returns them in any order.

    Events of a profile that are not runs of operations are left out: events of threads that wait,
    and events that only mark the end of another event.

    Args:
      profile: a ``jax.profiler.ProfileData``, or what `profile_data` returns in its place.
      module: the name of the compiled program.
      ordinals: for each of this process's cores, the number by which profiles name its device.
    """
    planes = list(profile.planes)
    began = [t for p in planes for name, t in p.stats if name == "profile_start_time"]
    start = began[0] if began else 0
    devices = [(plane, match) for plane in planes if (match := _DEVICE.match(plane.name))]
    if devices:
        found = [
            one for p, match in devices for one in _runs_on_accelerator(p, start, int(match[1]))
        ]
        return _with_core_numbers(found, ordinals)
    host = next((p for p in planes if p.name == _HOST), None)
    if host is None:
        return []
    return _with_core_numbers(_runs_on_cpu_devices(host, start, module, len(ordinals)), ordinals)


def _events(line: Any, start: int) -> Iterator[tuple[Any, int, int]]:
    """Yields (event, begin, end) for the events of a line, in the order in which they begin.

    The times `begin` and `end` are in nanoseconds since the epoch. `line` is a line of a profile:
    the events of one thread or stream. `start` is the time at which the profile begins. Some
    versions of jax count the times of events from this time; `start` is then added to them.
    """
    for event in sorted(line.events, key=lambda e: (e.start_ns, -e.duration_ns)):
        # Versions of jax count from the epoch, or from the beginning of the profile.
        begin = int(event.start_ns) + (0 if event.start_ns > 10**17 else start)
        yield event, begin, begin + int(event.duration_ns)


def _stats(event: Any) -> dict[str, Any]:
    """Returns the named values that a profile has noted for `event`, by name.

    An example of a named value is the identifier of the program's run. If the event has a name
    several times, the first value is returned.
    """
    return dict(reversed(list(event.stats)))


def _runs_on_accelerator(plane: Any, start: int, ordinal: int) -> Iterator[_ProfiledRun]:
    """Yields the runs of operations on one accelerator, a GPU or a TPU.

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
                yield _ProfiledRun(ordinal, stats.get("run_id"), operation, begin, end)


def _runs_on_cpu_devices(plane: Any, start: int, module: str, cores: int) -> list[_ProfiledRun]:
    """Returns the runs of operations on CPU devices, from the events of the host's threads.

    If the profile does not say which device an operation ran on, `_find_devices` finds the device.

    Args:
      plane: the part of a profile about the host.
      start: the beginning of the profile, in nanoseconds.
      module: the name of the compiled program.
      cores: how many cores this process has.
    """
    ends: dict[Any, int] = {}
    pool = _ThreadPool()
    found: list[tuple[Any, Any, list[Any], _ProfiledRun]] = []
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
                pool.starting_tasks.add(task)
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
                    one = _ProfiledRun(where, execution, stats["hlo_op"], begin, end)
                    found.append((task, stats.get("_p"), tasks, one))
    placed = []
    for _, producer, scheduled, one in found:
        last = max((pool.end_of(t) for t in scheduled), default=0)
        placed.append(one._replace(end=max(one.end, ends.get(producer, last))))
    if all(one.where is not None for one in placed):
        return placed
    return _find_devices(placed, [task for task, *_ in found], pool, cores)


class _ThreadPool:
    """The tasks that ran in XLA's thread pool: which task scheduled which, and when they ended.

    A run of a program begins on each CPU device with one task, a starting task. This task schedules
    other tasks, which may schedule further tasks. All these tasks together run the program's
    operations on the device.
    """

    def __init__(self) -> None:
        self.starting_tasks: set[Any] = set()  # the tasks that began a program on a device
        self.scheduled: dict[Any, tuple[int, Any]] = {}  # when, and by which thread
        self._by: dict[Any, Any] = {}
        self._ended: dict[Any, int] = {}
        self._parts: dict[Any, list[Any]] = collections.defaultdict(list)

    def schedule(self, task: Any, by: Any, at: int, thread: Any) -> None:
        """Stores that a task was scheduled: by which task, when, and in which thread.

        Args:
          task: the scheduled task, as an identifier from the profile.
          by: the task that has scheduled it; None if it was scheduled outside all tasks.
          at: the time of the scheduling, in nanoseconds.
          thread: the name of the thread that has scheduled it.
        """
        self._by[task], self.scheduled[task] = by, (at, thread)
        if by not in self._ended:
            self._parts[by].append(task)

    def end(self, task: Any, at: int) -> None:
        """Stores that a task ended at the time `at`, unless an end is stored already."""
        self._ended.setdefault(task, at)

    def starting_task(self, task: Any) -> Any:
        """Finds the task that began the program on a device, and that has led to `task`.

        The search goes back from `task` to the task that scheduled it, and so on. The result may be
        `task` itself. The result is None if the search finds no task that began a program.
        """
        while task is not None and task not in self.starting_tasks:
            task = self._by.get(task)
        return task

    def end_of(self, task: Any) -> int:
        """Returns when a task and all tasks that it scheduled had ended, in ns; 0 if not known."""
        parts = walk([task], lambda one: self._parts.get(one, ()))
        return max(self._ended.get(one, 0) for one in parts)


_Place = tuple[int, int]  # number of a program's execution, and number of the device


def _find_devices(
    found: Sequence[_ProfiledRun], task_of: Sequence[Any], pool: _ThreadPool, cores: int
) -> list[_ProfiledRun]:
    """Returns the runs in `found` with `where` and `execution` filled in, by means of the tasks.

    Profiles of jaxlib 0.4 do not say on which device an operation ran. But each run of the program
    has one starting task for each device, and these tasks are scheduled in the devices' order. The
    task that ran an operation was scheduled, directly or indirectly, by a starting task. Mostly the
    operation ran on the device of this starting task.

    There are exceptions. If a device has to wait in the middle of the program, another task may go
    on with the waiting device's operations: a task of another device, or of an earlier run of the
    program. All devices run each operation equally often. So if one starting task has more runs of
    an operation than other starting tasks have, the surplus runs are given to a device that has too
    few.

    Args:
      found: the runs.
      task_of: for each of `found`, the task that ran it.
      pool: the tasks, and which task scheduled which.
      cores: how many cores this process has.

    Raises:
      TimelineError: when the device cannot be found for more than one in a hundred runs.
    """
    if cores == 1:
        return [one._replace(where=0, execution=None) for one in found]
    begun = sorted(pool.starting_tasks - {None}, key=lambda root: pool.scheduled.get(root, (0, "")))
    place = {root: divmod(number, cores) for number, root in enumerate(begun)}
    runs: dict[str, list[tuple[_Place | None, _ProfiledRun]]] = {}
    for one, task in sorted(zip(found, task_of), key=lambda pair: pair[0].begin):
        runs.setdefault(one.operation, []).append((place.get(pool.starting_task(task)), one))
    places = sorted(place.values())
    by_place: dict[_Place, list[_ProfiledRun]] = {p: [] for p in places}
    in_branches = []
    for of_operation in runs.values():
        runs_per_place = min(
            collections.Counter(p for p, _ in of_operation if p).values(), default=0
        )
        if len(of_operation) == runs_per_place * len(places):
            _distribute_runs(of_operation, runs_per_place, places, by_place)
        else:
            in_branches.append(of_operation)
    began = {p: min(one.begin for one in ran) for p, ran in by_place.items() if ran}
    for of_operation in in_branches:
        for trusts_tasks in (True, False):
            likely, taken = _executions_of_branch(of_operation, began, trusts_tasks)
            runs_per_place = max(len(likely) // max(cores * len(taken), 1), 1)
            if len(likely) == runs_per_place * cores * len(taken):
                break
        _distribute_runs(likely, runs_per_place, [p for p in places if p[0] in taken], by_place)
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


def _executions_of_branch(
    of_operation: Sequence[tuple[_Place | None, _ProfiledRun]],
    began: dict[_Place, int],
    trusts_tasks: bool,
) -> tuple[list[tuple[_Place | None, _ProfiledRun]], set[int]]:
    """Finds the executions (runs of the program) in which an operation of a branch has run.

    Each run of the operation was made by a task of jax's thread pool. If `trusts_tasks` is True,
    the run belongs to the execution of this task, unless the next execution on the same device
    began before the run. If the execution of the task is not known, or if `trusts_tasks` is False,
    the run belongs to the execution that was the last on any device to begin before the run.

    Args:
      of_operation: pairs (place, run) with all runs of the operation. A place is a pair, the number
        of an execution and the number of a device; here it is the place of the task that ran the
        operation, or None if that is not known.
      began: for each place, when the execution began on the device.
      trusts_tasks: whether a run of the operation belongs to the execution of the program that the
        run's task of the thread pool names; False to decide by the times alone.

    Returns:
      Two values. The first has the pairs (place, run). A place is None if it was None, or if the
      run belongs to another execution than the run's task does. The second has the numbers of the
      executions in which the operation has run.
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


def _distribute_runs(
    of_operation: Sequence[tuple[_Place | None, _ProfiledRun]],
    runs_per_place: int,
    places: Sequence[_Place],
    by_place: dict[_Place, list[_ProfiledRun]],
) -> None:
    """Distributes the runs of an operation, so that each place gets `runs_per_place` of them.

    A place is a pair: the number of an execution of the program and the number of a device. A place
    first gets the runs that are likely its own. Places that then have too few runs get the runs
    that are left over.

    Args:
      of_operation: pairs (likely place, run), in the order in which the runs began. The likely
        place is None if it is not known.
      runs_per_place: how many runs each place gets.
      places: the places to give runs to.
      by_place: a dict with a list of runs for each place; the runs are added to these lists.
    """
    own: dict[_Place, list[_ProfiledRun]] = {p: [] for p in places}
    others: list[_ProfiledRun] = []
    for at, one in of_operation:
        if at is not None and at in own and len(own[at]) < runs_per_place:
            own[at].append(one)
        else:
            others.append(one)
    left = iter(others)
    for at in places:
        by_place[at] += [*own[at], *itertools.islice(left, runs_per_place - len(own[at]))]


def _with_core_numbers(
    found: Sequence[_ProfiledRun], ordinals: Sequence[int]
) -> list[OperationRun]:
    """Converts the runs in `found`, by numbering cores and executions.

    `ordinals` has, for each of this process's cores, the number by which profiles name the core's
    device. Runs on devices that are not in `ordinals` are left out. Executions, which are runs of
    the program, are numbered in the order in which they begin.
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
    numbers = {execution: i for i, execution in enumerate(known)}
    return [
        OperationRun(
            core_of[one.where], numbers.get(one.execution, -1), one.operation, one.begin, one.end
        )
        for one in found
        if one.where in core_of
    ]


def innermost_runs(
    ran: Sequence[OperationRun], inside: Mapping[str, set[str]]
) -> list[OperationRun]:
    """Returns `ran` without the runs of loops, branches and calls, whose time is in other runs.

    `inside` has, for the name of each loop, branch or call, the names of the operations in it. If
    `ran` has no run of these operations, the runs of the loop, branch or call are kept.
    """
    seen = {one.operation for one in ran}
    around = {name for name, inner in inside.items() if inner & seen}
    return [one for one in ran if one.operation not in around]


def cut_at_first_use(
    ran: Sequence[OperationRun], users: Mapping[str, set[str]]
) -> list[OperationRun]:
    """Returns the runs in `ran`, each cut off when the first operation that uses its result begins.

    On a CPU device, one thread begins an operation and other threads compute the result. In a
    profile the run of the operation ends only when the thread that began the operation has noticed
    that the result is computed. The keys of `users` are the names of operations; each value has the
    names of the operations that use the operation's result.
    """
    seen = {one.operation for one in ran}
    begins: dict[tuple[int, int, str], list[int]] = collections.defaultdict(list)
    for one in sorted(ran, key=lambda one: one.begin):
        begins[one.core, one.execution, one.operation].append(one.begin)
    next_seen = {name: _recorded_users(name, users, seen) for name in seen}
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


def _recorded_users(name: str, users: Mapping[str, set[str]], seen: set[str]) -> set[str]:
    """Returns the names of operations in a profile that use the result of operation `name`.

    If an operation that uses the result is missing in the profile, it is taken to need no time. The
    operations that use the missing operation's own result are then returned in its place.

    Args:
      name: the operation's name.
      users: for the name of an operation, the names of the operations that take its result.
      seen: the names of the operations that the profile has.
    """
    every = walk(users.get(name, ()), lambda user: () if user in seen else users.get(user, ()))
    return seen.intersection(every)
