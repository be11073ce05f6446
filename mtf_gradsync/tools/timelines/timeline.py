"""Records some steps, and writes a trace of where their time went, which Perfetto can show."""

from __future__ import annotations

import bisect
import dataclasses
import gzip
import itertools
import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, ContextManager, Iterator, NamedTuple, Sequence

from mtf_gradsync.runtimes._common import write_bytes
from mtf_gradsync.tools.timelines.recording import Event, Recording, TimelineError
from mtf_gradsync.tools.timelines.table import Table, tabulate_times

MOST_BYTES = 20_000_000
# Tracks of a process and of a core, from 1 on: Perfetto takes 0 for the track of the pid's number.
_STEPS, _HOST = 1, 2
_COMPUTE, _COLLECTIVES = 1, 1001
_BETWEEN = ",\n"


class Written(NamedTuple):
    """A trace that was written to a file.

    Attributes:
      path: the file.
      events: how many runs of operations the trace shows.
      dropped: how many of the shortest runs the trace leaves out, so that the file is not too
        large.
      dropped_calls: how many pieces of work of the hosts the trace leaves out.
      dropped_steps: how many steps, in the middle of the recording, have no mark in the trace.
    """

    path: Path
    events: int
    dropped: int
    dropped_calls: int = 0
    dropped_steps: int = 0

    def __str__(self) -> str:
        counts = (
            (self.dropped, "shortest operations"),
            (self.dropped_calls, "shortest calls of the host"),
            (self.dropped_steps, "marks of steps in the middle"),
        )
        missing = ", ".join(f"{count:,} {what}" for count, what in counts if count)
        without = f", without the {missing}" if missing else ""
        return f"trace of {self.events:,} operations{without}: {self.path}"


def write_trace(
    recordings: Sequence[Recording], path: str | Path, most_bytes: int = MOST_BYTES
) -> Written:
    """Writes the recordings of processes as one trace in Chrome's trace event format.

    In the trace, every core has a group of tracks: tracks that show operations, and tracks that
    show collectives. Operations that run at the same time are on different tracks. Each process has
    a track that shows its steps, and a track that shows the work of its host.

    Args:
      recordings: the recording of each process.
      path: the file to write; it is compressed if the name ends in ".gz".
      most_bytes: the largest size of the file. If the file would be larger, the shortest operations
        are left out, then also the shortest pieces of work of the hosts, then marks of steps in the
        middle.

    Returns:
      The path, how many operations the trace shows, and how much it leaves out.

    Raises:
      ValueError: when `most_bytes` is smaller than the size of an empty trace.
    """
    path = Path(path)
    timed, tracks = _operation_entries(recordings)
    # The most important rows come first.
    parts = [
        [*_track_names(recordings), *tracks],
        _step_marks(recordings),
        _host_entries(recordings),
        timed,
    ]
    rows = [json.dumps(row, separators=(",", ":")) for part in parts for row in part]
    sizes = list(itertools.accumulate(len(row) + len(_BETWEEN) for row in rows))
    kept = len(rows)
    while True:
        left, shown = kept, []
        for part in parts:
            shown.append(min(left, len(part)))
            left -= shown[-1]
        dropped = [len(part) - count for part, count in zip(parts, shown)]
        content = _content(rows[:kept], dropped)
        data = gzip.compress(content, 6, mtime=0) if path.suffix == ".gz" else content
        if len(data) <= most_bytes:
            break
        if not kept:
            raise ValueError(
                f"A trace cannot have {most_bytes} bytes; an empty one has {len(data)}."
            )
        fits = bisect.bisect_right(sizes, int(sizes[kept - 1] * most_bytes / len(data) * 0.97))
        kept = min(kept - 1, fits)
    write_bytes(path, data)
    _, steps, calls, operations = dropped
    return Written(path, shown[-1], operations, calls, steps)


def _content(rows: Sequence[str], dropped: Sequence[int]) -> bytes:
    _, steps, calls, events = dropped
    counts = {"dropped_events": events, "dropped_calls": calls, "dropped_steps": steps}
    # With "ms", chrome://tracing rounds to microseconds, and what follows within one looks nested.
    head = json.dumps({"displayTimeUnit": "ns", "otherData": counts})
    return f'{head[:-1]}, "traceEvents": [\n{_BETWEEN.join(rows)}\n]}}\n'.encode()


def _track_names(recordings: Sequence[Recording]) -> Iterator[dict[str, Any]]:
    """Yields the entries of a trace that name tracks of processes and each core's group of tracks.

    `recordings` has the recording of each process. An entry is a dict, as Chrome's trace event
    format describes it.
    """
    for recording in recordings:
        pid = _host_pid(recording)
        several = f" of process {recording.process}" if len(recordings) > 1 else ""
        yield from _named("process", f"steps{several}", -1, pid=pid)
        yield from _named("thread", "steps", _STEPS, pid=pid, tid=_STEPS)
        yield from _named("thread", "host", _HOST, pid=pid, tid=_HOST)
        for core, name in recording.cores.items():
            pid = _core_pid(recording, core)
            yield from _named("process", name, pid, pid=pid)


def _step_marks(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """Returns the entries of a trace that mark steps.

    `recordings` has the recording of each process. Steps in the middle of a recording come last in
    the list, because entries at the list's end are left out first if the trace becomes too large.
    """
    found = []
    first = _first(recordings)
    for recording in recordings:
        pid, count = _host_pid(recording), len(recording.steps)
        for number, step in enumerate(recording.steps):
            kind = {True: " (update)", False: " (no update)", None: ""}[step.is_update]
            row = _slice(pid, _STEPS, f"step {number}{kind}", step.begin, step.end, first)
            found.append((min(number, count - 1 - number), row))
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]


def _host_entries(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """Returns the entries of a trace that show the work of the hosts.

    `recordings` has the recording of each process. The shortest work comes last in the list,
    because entries at the list's end are left out first if the trace becomes too large.
    """
    first = _first(recordings)
    found = [(_host_pid(recording), call) for recording in recordings for call in recording.calls]
    found.sort(key=lambda pair: pair[1].begin - pair[1].end)
    return [_slice(pid, _HOST, c.name, c.begin, c.end, first) for pid, c in found]


def _operation_entries(
    recordings: Sequence[Recording],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the entries of a trace that show operations, and the entries that name their tracks.

    `recordings` has the recording of each process. The first list has the entries that show
    operations. In it the shortest operations come last, because entries at the list's end are left
    out first if the trace becomes too large.
    """
    found: list[tuple[int, dict[str, Any]]] = []
    tracks: list[dict[str, Any]] = []
    first = _first(recordings)
    for recording in recordings:
        lanes: dict[tuple[int, str], list[int]] = {}
        for event in sorted(recording.events, key=lambda e: (e.begin, -e.end)):
            track = _free_track(lanes.setdefault((event.core, event.kind), []), event)
            pid, tid = _core_pid(recording, event.core), _track_number(event.kind, track)
            row = _slice(pid, tid, event.name, event.begin, event.end, first)
            row["cat"] = event.kind
            known = recording.collectives.get(event.name) if event.kind == "collective" else None
            if known is not None:
                row["args"] = {
                    "bytes_per_core": known.bytes_per_core,
                    "variables": list(known.variables or ()),
                }
            found.append((event.end - event.begin, row))
        for (core, kind), ends in lanes.items():
            name = "collectives" if kind == "collective" else "operations"
            for track in range(len(ends)):
                beside = f" {track + 1}" if track else ""
                pid, tid = _core_pid(recording, core), _track_number(kind, track)
                tracks += _named("thread", name + beside, tid, pid=pid, tid=tid)
    found.sort(key=lambda pair: -pair[0])
    return [row for _, row in found], tracks


def _free_track(ends: list[int], event: Event) -> int:
    """Chooses the track that shows an event; returns its number, from 0.

    The chosen track is the first one that is free when the event begins. `ends` has, for each
    track, the time until which the track is in use. The list `ends` is updated.
    """
    for track, end in enumerate(ends):
        if end <= event.begin:
            ends[track] = event.end
            return track
    ends.append(event.end)
    return len(ends) - 1


def _track_number(kind: str, track: int) -> int:
    """Returns the number that a trace has for a track of a core.

    `kind` is "compute" or "collective", and `track` is the number of the track among the core's
    tracks of this kind. Tracks of collectives have higher numbers than all other tracks.
    """
    return track + (_COLLECTIVES if kind == "collective" else _COMPUTE)


def _first(recordings: Sequence[Recording]) -> int:
    return min(recording.steps[0].begin for recording in recordings)


def _host_pid(recording: Recording) -> int:
    return 1 + recording.process


def _core_pid(recording: Recording, core: int) -> int:
    return 10_000 * (recording.process + 1) + core


def _slice(pid: int, tid: int, name: str, begin: int, end: int, first: int) -> dict[str, Any]:
    times = {"ts": _microseconds(begin - first), "dur": _microseconds(end - begin)}
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, **times}


def _microseconds(nanoseconds: int) -> float:
    """Returns a time in nanoseconds as microseconds, for a trace.

    If a program that reads the trace rounds these microseconds down to whole nanoseconds, the
    program gets exactly the time that this function was given.
    """
    number = nanoseconds / 1000
    return number if int(1000 * number) == nanoseconds else math.nextafter(number, math.inf)


def _named(kind: str, name: str, order: int, **ids: int) -> list[dict[str, Any]]:
    """Returns the entries that name a group of tracks (`kind` "process") or a track ("thread").

    `order` is its place among others, and `ids` are the numbers of the process and thread.
    """
    return [
        {"name": f"{kind}_name", "ph": "M", **ids, "args": {"name": name}},
        # Without it chrome://tracing sorts by name.
        {"name": f"{kind}_sort_index", "ph": "M", **ids, "args": {"sort_index": order}},
    ]


def timeline(session: Any, path: str | Path | None = None, *, lowering: Any = None) -> Timeline:
    """Records where the time of some training steps goes, on any runtime.

        session.run(train_op)  # compiles, and fills caches
        with gs.timeline(session, "trace.json.gz") as timeline:
            for _ in range(5):
                session.run(train_op)
        print(timeline.table())

    Every call of ``session.run`` in the ``with`` block counts as a step if it runs the model. A
    step lasts from the end of the step before it to its own end. So the time of a step includes
    what the program does between two steps, such as reading a batch. The first step begins when the
    ``with`` block begins.

    If a program runs in several processes on XLA devices, all processes have to enter the ``with``
    block together and leave it together. Afterwards each process has the recordings of all
    processes.

    Args:
      session: what runs the steps: a session of `mtf_gradsync.simd` or `mtf_gradsync.xla`, or, for
        a placement mesh, a ``tf.Session`` or a monitored session.
      path: a file to write the trace to when the ``with`` block ends; None to write none.
      lowering: the program's lowering. It tells the names of all variables that Mesh-TF has stacked
        into one. Without it, a stack has the name of its first variable.

    Returns:
      A `Timeline`, to be used as a context manager.

    Raises:
      TypeError: when `session` is no session.
    """
    return Timeline(_recorder_of(session, lowering), path)


class Timeline:
    """A recording of some steps. Use it as a context manager, around the steps.

    Attributes:
      written: the trace that was written last; None before a trace is written.
    """

    def __init__(
        self, recorder: ContextManager[list[Recording]] | None, path: str | Path | None = None
    ):
        """Makes a timeline; users call `timeline` or `Timeline.of` for this.

        `recorder` is a context manager that records steps: it gives an empty list, and adds the
        recordings to this list at the end of the ``with`` block. `recorder` is None if
        `Timeline.of` makes the timeline, because the recordings exist already. `path` is the file
        to write a trace to; None to write no trace.
        """
        self._recorder, self._path = recorder, path
        self._running: ContextManager[list[Recording]] | None = None
        self._recordings: list[Recording] = []
        self.written: Written | None = None

    @classmethod
    def of(cls, recordings: Sequence[Recording]) -> Timeline:
        """Returns a timeline of recordings that were made before, one of each process.

        Args:
          recordings: recordings of processes that made the same steps; the clocks of the
            processes have to agree.

        Raises:
          TimelineError: when the recordings differ in runtime or in the number of steps, or when
            two recordings are of the same process.
        """
        if len({(r.runtime, len(r.steps)) for r in recordings}) != 1:
            counts = ", ".join(f"{r.process}: {len(r.steps)} of {r.runtime}" for r in recordings)
            raise TimelineError(
                "These recordings are not parts of one timeline: all processes must have the same "
                f"runtime and make equally many steps, but the steps by process are {counts}."
            )
        processes = [r.process for r in recordings]
        if len(set(processes)) != len(processes):
            raise TimelineError(
                "Two parts of a timeline are of the same process; the numbers of the processes "
                f"are {sorted(processes)}."
            )
        made = cls(None)
        made._recordings = sorted(recordings, key=lambda r: r.process)
        return made

    def __enter__(self) -> Timeline:
        """Begins the recording; raises TimelineError if this timeline was used before."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise TimelineError(
                "A timeline records one `with` block. This timeline has been used for a block "
                "before, or was made of recordings. Call gs.timeline(session) again for each block."
            )
        self._recordings = recorder.__enter__()
        self._running = recorder
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the recording, and writes the trace if the timeline has a path.

        If an exception ends the block, `error` is the exception, and `kind` and `trace` are its
        type and traceback; no trace of the steps is written. If no exception ends the block, the
        three arguments are None. Raises TimelineError if no step was recorded, or if a core has no
        operation.
        """
        recorder, self._running = self._running, None
        assert recorder is not None
        recorder.__exit__(kind, error, trace)
        if kind is None and self._path is not None:
            self.save(self._path)

    def mark_updates(self, updates: Sequence[int]) -> None:
        """Marks the steps that updated the variables, for programs that count their updates.

        Args:
          updates: the number of updates that were made before the first step, and for each step the
            number that were made until its end. For two steps these are three numbers. A list of
            another length is ignored.
        """

        def marked(recording: Recording) -> Recording:
            pairs = zip(recording.steps, updates, updates[1:])
            steps = tuple(dataclasses.replace(s, is_update=a != b) for s, a, b in pairs)
            return dataclasses.replace(recording, steps=steps)

        if len(updates) == len(self.recordings[0].steps) + 1:
            self._recordings = [*map(marked, self._recordings)]

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """The recordings, one of each process.

        Raises:
          TimelineError: when the ``with`` block has not ended yet.
        """
        if not self._recordings:
            raise TimelineError(
                "The timeline has no recordings before the end of the `with` block."
            )
        return tuple(self._recordings)

    def table(self) -> Table:
        """Computes the table of where the time of the recorded steps went.

        Returns:
          The table; ``print`` shows it, and ``to_json`` gives it to other programs.

        Raises:
          TimelineError: when the ``with`` block has not ended yet.
        """
        return tabulate_times(self.recordings)

    def save(self, path: str | Path, most_bytes: int = MOST_BYTES) -> Written:
        """Writes a trace that https://ui.perfetto.dev and chrome://tracing open.

        Args:
          path: the file; it is compressed if the name ends in ".gz".
          most_bytes: the largest size of the file. If the file would be larger, the shortest
            operations are left out, then also the shortest calls of the host, then marks of steps
            in the middle.

        Returns:
          A `Written`: the path, how many operations the trace shows, and how many operations,
            calls of the host and marks of steps it leaves out. ``print`` shows these numbers.

        Raises:
          TimelineError: when the ``with`` block has not ended yet.
          ValueError: when `most_bytes` is smaller than the size of an empty trace.
        """
        self.written = write_trace(self.recordings, path, most_bytes)
        return self.written


def _recorder_of(session: Any, lowering: Any) -> ContextManager[list[Recording]]:
    """Returns the context manager that records steps on the runtime of a session.

    The context manager gives an empty list, and at the end of the ``with`` block it adds the
    recordings to this list. `session` is what runs the steps, and `lowering` is the program's
    lowering, for the names of variables; it may be None. Raises a TypeError if `session` is no
    session.
    """
    # Not above: programs that record nothing need not wait for these.
    from mtf_gradsync.runtimes.sessions import ProgramSession
    from mtf_gradsync.runtimes.simd.program import CpuReplicaSession
    from mtf_gradsync.runtimes.xla.xla_session import XlaSession
    from mtf_gradsync.tools.timelines.tensorflow_steps import record_mesh, record_replicas
    from mtf_gradsync.tools.timelines.xla_steps import record_xla

    inner = session
    if hasattr(session, "run_step_fn"):  # a monitored session
        # The argument's name is prescribed.
        inner = session.run_step_fn(lambda step_context: step_context.session)
    if isinstance(inner, ProgramSession):
        inner = inner.session
    if isinstance(inner, XlaSession):
        return record_xla(inner, lowering)
    if isinstance(inner, CpuReplicaSession):
        return record_replicas(inner, lowering)
    if not hasattr(session, "run") or not hasattr(session, "graph"):
        raise TypeError(f"gs.timeline needs a session, got {session!r}.")
    # The address of a tf.train.Server, where one runs the steps.
    return record_mesh(session, is_remote=bool(getattr(inner, "sess_str", "")))
