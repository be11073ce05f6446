"""Writes recordings as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import math
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

from mtf_gradsync.runtimes.manifest import write_bytes
from mtf_gradsync.timelines.events import Event, Recording

MOST_BYTES = 20_000_000
# Tracks of a process and of a core, from 1 on: Perfetto takes 0 for the track of the pid's number.
_STEPS, _HOST = 1, 2
_COMPUTE, _COLLECTIVES = 1, 1001
_BETWEEN = ",\n"


class Written(NamedTuple):
    """What was written.

    Attributes:
      path: the file.
      events: how many runs of operations it shows.
      dropped: how many of the shortest it does not, so that it is not too large.
      dropped_calls: likewise, how many calls of hosts.
      dropped_steps: likewise, how many marks of steps, from the middle of the recording.
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

    Every core is a group of tracks: operations, those that run at the same time beside each other,
    and collectives. A track of each process shows the steps, another what its host did. See
    `Timeline.save` for the file.

    Raises:
      ValueError: when `most_bytes` are fewer than those of an empty trace.
    """
    path = Path(path)
    timed, tracks = _timed(recordings)
    # The most important rows come first.
    parts = [[*_names(recordings), *tracks], _steps(recordings), _calls(recordings), timed]
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


def _names(recordings: Sequence[Recording]) -> Iterator[dict[str, Any]]:
    """Names of the tracks of processes, and of the groups of tracks of cores."""
    for recording in recordings:
        pid = _host_pid(recording)
        several = f" of process {recording.process}" if len(recordings) > 1 else ""
        yield from _named(pid, f"steps{several}", -1)
        yield from [*_thread(pid, _STEPS, "steps"), *_thread(pid, _HOST, "host")]
        for core, name in recording.cores.items():
            yield from _named(_core_pid(recording, core), name, _core_pid(recording, core))


def _steps(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """Marks of steps, those in the middle of the recording last."""
    found = []
    first = _first(recordings)
    for recording in recordings:
        pid, count = _host_pid(recording), len(recording.steps)
        for number, step in enumerate(recording.steps):
            kind = {True: " (update)", False: " (no update)", None: ""}[step.is_update]
            row = _slice(pid, _STEPS, f"step {number}{kind}", step.begin, step.end, first)
            found.append((min(number, count - 1 - number), row))
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]


def _calls(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """What hosts did, the shortest last."""
    first = _first(recordings)
    found = [(_host_pid(recording), call) for recording in recordings for call in recording.calls]
    found.sort(key=lambda pair: pair[1].begin - pair[1].end)
    return [_slice(pid, _HOST, c.name, c.begin, c.end, first) for pid, c in found]


def _timed(
    recordings: Sequence[Recording],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Runs of operations, the shortest last, and the names of their tracks."""
    found: list[tuple[int, dict[str, Any]]] = []
    tracks: list[dict[str, Any]] = []
    first = _first(recordings)
    for recording in recordings:
        lanes: dict[tuple[int, str], list[int]] = {}
        for event in sorted(recording.events, key=lambda e: (e.begin, -e.end)):
            lane = _lane(lanes.setdefault((event.core, event.kind), []), event)
            pid, tid = _core_pid(recording, event.core), _tid(event.kind, lane)
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
            for lane in range(len(ends)):
                beside = f" {lane + 1}" if lane else ""
                tracks += _thread(_core_pid(recording, core), _tid(kind, lane), name + beside)
    found.sort(key=lambda pair: -pair[0])
    return [row for _, row in found], tracks


def _lane(ends: list[int], event: Event) -> int:
    """The first lane that is free when an event begins."""
    for lane, end in enumerate(ends):
        if end <= event.begin:
            ends[lane] = event.end
            return lane
    ends.append(event.end)
    return len(ends) - 1


def _tid(kind: str, lane: int) -> int:
    """The number of a track: collectives come after the operations."""
    return lane + (_COLLECTIVES if kind == "collective" else _COMPUTE)


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
    """A number of microseconds of which a reader that cuts off makes the same nanoseconds."""
    number = nanoseconds / 1000
    return number if int(1000 * number) == nanoseconds else math.nextafter(number, math.inf)


def _named(pid: int, name: str, order: int) -> list[dict[str, Any]]:
    return [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}},
        {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": order}},
    ]


def _thread(pid: int, tid: int, name: str) -> list[dict[str, Any]]:
    return [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}},
        # Without it chrome://tracing sorts by name.
        {
            "name": "thread_sort_index",
            "ph": "M",
            "pid": pid,
            "tid": tid,
            "args": {"sort_index": tid},
        },
    ]
