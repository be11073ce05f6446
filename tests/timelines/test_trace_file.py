"""Traces, as their readers want them."""

import collections
import gzip
import json

from mtf_gradsync.timelines import Step
from mtf_gradsync.timelines.trace_file import write_trace
from tests.timelines.recordings import MS, event, two_cores


def read(path):
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def slices(trace):
    return [row for row in trace["traceEvents"] if row["ph"] == "X"]


def test_every_row_has_what_its_kind_needs(tmp_path):
    written = write_trace([two_cores(0), two_cores(1)], tmp_path / "trace.json")
    trace = read(written.path)
    assert (written.events, written.dropped) == (16, 0)
    for row in trace["traceEvents"]:
        assert {"name", "ph", "pid"} <= set(row)
        assert row["ph"] == "M" or {"ts", "dur", "tid"} <= set(row)
    names = {r["args"]["name"] for r in trace["traceEvents"] if r["name"] == "process_name"}
    cores = {f"core {i}" for i in range(4)}
    assert names == cores | {"steps of process 0", "steps of process 1"}
    steps = [r["name"] for r in slices(trace) if r["name"].startswith("step ")]
    assert steps == ["step 0 (no update)", "step 1 (update)"] * 2
    sums = [r for r in slices(trace) if r["name"] == "sum"]
    assert all(r["args"] == {"bytes_per_core": 4096, "variables": ["w", "v"]} for r in sums)
    # In microseconds from the first step on.
    assert min(r["ts"] for r in slices(trace)) == 0
    assert {(r["ts"], r["dur"]) for r in sums} >= {(3000, 3000), (18000, 2000)}


def test_what_runs_at_the_same_time_is_on_tracks_beside_each_other(tmp_path):
    events = (
        event(0, "a", 0, 4),
        event(0, "b", 1, 5),
        event(0, "c", 4, 6),
        event(0, "s", 2, 3, "collective"),
    )
    recording = two_cores(events=events, steps=(Step(0, 6 * MS),))
    trace = read(write_trace([recording], tmp_path / "trace.json.gz").path)
    tracks = collections.defaultdict(list)
    for row in slices(trace):
        tracks[row["pid"], row["tid"]].append((row["ts"], row["ts"] + row["dur"]))
    for times in tracks.values():
        times.sort()
        assert all(a[1] <= b[0] for a, b in zip(times, times[1:]))
    named = [r["args"]["name"] for r in trace["traceEvents"] if r["name"] == "thread_name"]
    assert named == ["steps", "host", "operations", "operations 2", "collectives"]


def test_a_large_trace_drops_the_shortest_first(tmp_path):
    lengths = [0.001 * (1 + i % 100) for i in range(4000)]
    events = tuple(event(0, f"op {i}", i, i + d) for i, d in enumerate(lengths))
    recording = two_cores(events=events, steps=(Step(0, 5000 * MS, True),))
    for name, most in (("trace.json", 30_000), ("trace.json.gz", 10_000)):
        written = write_trace([recording], tmp_path / name, most_bytes=most)
        assert written.path.stat().st_size <= most
        assert 0 < written.events == 4000 - written.dropped
        trace = read(written.path)
        assert trace["otherData"]["dropped_events"] == written.dropped
        kept = [r for r in slices(trace) if r["name"].startswith("op ")]
        assert len(kept) == written.events
        # As many as fit, to a fifth, and they are the longest.
        assert written.path.stat().st_size > 0.8 * most
        shortest = sorted(lengths)[written.dropped]
        assert min(r["dur"] for r in kept) / 1000 >= shortest - 1e-6
        assert any(r["name"] == "step 0 (update)" for r in slices(trace))
