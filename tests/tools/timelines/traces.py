"""Reads traces by the rules of Chrome's trace event format, as Perfetto applies them."""

import collections
import gzip
import json
import math
import numbers

# To how many parts of a millisecond chrome://tracing rounds, by the unit that a trace names.
ROUNDED = {"ms": 1000, "ns": 1_000_000}
# Kinds of rows: complete events, and metadata.
NEEDED = {"X": {"name", "ph", "ts", "dur", "pid", "tid"}, "M": {"name", "ph", "pid", "args"}}
METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def read(path):
    """The content of a trace."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def slices(trace):
    """Its complete events."""
    return [row for row in trace["traceEvents"] if row["ph"] == "X"]


def tracks(trace):
    """The complete events of each track, by pid and tid, in the order of their beginnings."""
    found = collections.defaultdict(list)
    for row in sorted(slices(trace), key=lambda r: (r["ts"], -r["dur"])):
        found[row["pid"], row["tid"]].append(row)
    return found


def process_names(trace):
    """The names of groups of tracks, by pid."""
    rows = [r for r in trace["traceEvents"] if r["name"] == "process_name"]
    names = {r["pid"]: r["args"]["name"] for r in rows}
    assert len(names) == len(rows)
    return names


def check(trace):
    """Checks what readers ask of a trace: Perfetto drops or moves events that break these rules.

    Raises:
      AssertionError: a row lacks a field or has one of another type, a time is no number or before
        the first step, slices of a track overlap without one inside the other, chrome://tracing
        takes one that follows another for a part of it, or a track has no name.
    """
    parts = ROUNDED[trace["displayTimeUnit"]]
    named = set()
    for row in trace["traceEvents"]:
        assert NEEDED[row["ph"]] <= set(row), row
        assert isinstance(row["name"], str), row
        assert row["name"], row
        for number in ("pid", "tid"):
            # Perfetto reads them as 32 bits.
            assert type(row.get(number, 0)) is int, row
            assert 0 <= row.get(number, 0) < 2**31, row
        # Perfetto takes track 0 for the one whose number is the pid: two tracks would be one.
        assert row.get("tid", 1) != 0, row
        if row["ph"] == "M":
            field, kind = METADATA[row["name"]]
            assert type(row["args"][field]) is kind, row
            if row["name"] == "thread_name":
                named.add((row["pid"], row["tid"]))
            continue
        for number in ("ts", "dur"):
            assert isinstance(row[number], numbers.Real), row
            assert not isinstance(row[number], bool), row
        assert row["dur"] >= 0, row
        assert isinstance(row.get("args", {}), dict), row
        assert isinstance(row.get("cat", ""), str), row
    found = tracks(trace)
    assert set(found) <= named
    assert {pid for pid, _ in found} <= set(process_names(trace))
    for rows in found.values():
        _check_nested(rows)
        _check_not_rounded_into_another(rows, parts)


def _check_not_rounded_into_another(rows, parts):
    """A slice is a part of another for chrome://tracing if its rounded times lie within."""

    def rounded(milliseconds):
        return math.floor(milliseconds * parts + 0.5)  # as Math.round does

    # What takes no time may stand at another's end.
    spans = [(r["ts"] / 1000, r["ts"] / 1000 + r["dur"] / 1000, r) for r in rows if r["dur"]]
    for (begin, end, row), (next_begin, next_end, _) in zip(spans, spans[1:]):
        inside = rounded(begin) <= rounded(next_begin) and rounded(next_end) <= rounded(end)
        assert not inside or next_begin < end, row


def _check_nested(rows):
    # As Perfetto reads them: it makes whole nanoseconds of both numbers, without rounding.
    open_until = []
    for row in rows:
        begin, end = int(1000 * row["ts"]), int(1000 * row["ts"]) + int(1000 * row["dur"])
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], row
        open_until.append(end)
