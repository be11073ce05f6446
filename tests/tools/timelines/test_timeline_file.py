"""Traces, as their readers want them."""

import collections
import copy

import pytest

from mtf_gradsync.tools.timelines import Call, Step
from mtf_gradsync.tools.timelines.table import tabulate_times
from mtf_gradsync.tools.timelines.timeline import write_trace
from tests.tools.timelines.recordings import MS, event, two_cores
from tests.tools.timelines.traces import check, process_names, read, slices, tracks


def test_every_row_has_what_its_kind_needs(tmp_path):
    written = write_trace([two_cores(0), two_cores(1)], tmp_path / "trace.json")
    trace = read(written.path)
    assert (written.events, written.dropped) == (16, 0)
    check(trace)
    names = set(process_names(trace).values())
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
    check(trace)
    for rows in tracks(trace).values():
        ends = [row["ts"] + row["dur"] for row in rows]
        assert all(end <= row["ts"] for end, row in zip(ends, rows[1:]))
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
        check(trace)
        assert trace["otherData"]["dropped_events"] == written.dropped
        kept = [r for r in slices(trace) if r["name"].startswith("op ")]
        assert len(kept) == written.events
        # As many as fit, to a fifth, and they are the longest.
        assert written.path.stat().st_size > 0.8 * most
        shortest = sorted(lengths)[written.dropped]
        assert min(r["dur"] for r in kept) / 1000 >= shortest - 1e-6
        assert any(r["name"] == "step 0 (update)" for r in slices(trace))
        assert (written.dropped_calls, written.dropped_steps) == (0, 0)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("most", [30_000, 8_000, 2_500])
def test_a_long_recording_keeps_to_the_limit(tmp_path, suffix, most):
    """Of 2,000 steps: calls of the host and marks of steps are more than the file may hold."""
    count = 2000
    recordings = [
        two_cores(
            process,
            steps=tuple(Step(i * MS, (i + 1) * MS, i % 2 == 1) for i in range(count)),
            events=tuple(event(2 * process, "op", i, i + 0.5) for i in range(count)),
            calls=tuple(Call("run", i * MS, i * MS + 300 + 7 * i) for i in range(count)),
        )
        for process in (0, 1)
    ]
    whole = write_trace(recordings, tmp_path / f"whole.json{suffix}")
    assert (whole.events, *whole[2:]) == (2 * count, 0, 0, 0)
    assert "without" not in str(whole)
    written = write_trace(recordings, tmp_path / f"trace.json{suffix}", most_bytes=most)
    assert written.path.stat().st_size <= most
    trace = read(written.path)
    check(trace)
    rows = collections.Counter(r["name"].partition(" ")[0] for r in slices(trace))
    assert rows["op"] == written.events == 2 * count - written.dropped
    assert rows["run"] == 2 * count - written.dropped_calls
    assert rows["step"] == 2 * count - written.dropped_steps
    # Steps stay as long as anything else is there, and calls as long as operations are.
    assert not rows["op"] or rows["run"] == 2 * count
    assert not rows["run"] or rows["step"] == 2 * count
    if written.dropped_steps:
        # The first and last ones of both processes are left.
        shown = [r["name"] for r in slices(trace)]
        assert shown[:4] == ["step 0 (no update)", f"step {count - 1} (update)"] * 2
        assert f"{written.dropped_steps:,} marks of steps in the middle" in str(written)
    others = trace["otherData"]
    assert others["dropped_events"] == written.dropped
    assert others["dropped_calls"] == written.dropped_calls
    assert others["dropped_steps"] == written.dropped_steps
    # The table counts what the trace does not show.
    total = tabulate_times(recordings).total
    assert (total.step, total.compute) == pytest.approx((1.0, 0.25))


def test_a_limit_below_an_empty_trace_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="cannot have 50 bytes"):
        write_trace([two_cores()], tmp_path / "trace.json", most_bytes=50)
    assert not any(tmp_path.iterdir())


def test_short_operations_follow_each_other(tmp_path):
    """Of some 100 ns: many are within a microsecond, to which chrome://tracing may round."""
    ends = [0, *(120 * i + i % 7 for i in range(1, 1000))]
    events = tuple(event(0, "op", a / MS, b / MS) for a, b in zip(ends, ends[1:]))
    recording = two_cores(events=events, steps=(Step(0, MS),))
    trace = read(write_trace([recording], tmp_path / "trace.json").path)
    check(trace)
    with pytest.raises(AssertionError):
        check({**trace, "displayTimeUnit": "ms"})


def test_operations_at_any_times_are_slices_that_do_not_overlap(tmp_path):
    """Of equal, nested, crossing and empty times, and names that JSON has to escape."""
    times = [(0, 9), (0, 9), (1, 1), (1, 4), (2, 3), (3, 12), (9, 9), (8.9999, 9.0001), (12, 12)]
    events = tuple(event(0, f'op "{i}"\n\\é', *pair) for i, pair in enumerate(times))
    recording = two_cores(events=events, steps=(Step(0, 12 * MS),))
    trace = read(write_trace([recording], tmp_path / "trace.json").path)
    check(trace)
    assert len([r for r in slices(trace) if r["name"].startswith("op ")]) == len(times)


@pytest.mark.parametrize(
    ("row", "field", "value"),
    [
        ("X", "dur", -1),
        ("X", "ts", "0"),
        ("X", "dur", 15_000),  # ends within the next step
        ("X", "tid", 77),  # has no name
        ("X", "pid", None),
        ("M", "args", {}),
    ],
)
def test_the_check_finds_what_readers_refuse(tmp_path, row, field, value):
    trace = read(write_trace([two_cores()], tmp_path / "trace.json").path)
    check(trace)
    broken = copy.deepcopy(trace)
    next(r for r in broken["traceEvents"] if r["ph"] == row)[field] = value
    with pytest.raises((AssertionError, KeyError)):
        check(broken)


def test_whole_nanoseconds_stay_what_they_are(tmp_path):
    """Of many begins and ends that meet, some are a nanosecond less when they are cut off."""
    ends = [0, *(1 + 1_234_567 * i for i in range(1, 200))]
    pairs = list(zip(ends, ends[1:]))
    events = tuple(event(0, "op", begin / MS, end / MS) for begin, end in pairs)
    recording = two_cores(events=events, steps=(Step(0, 300 * MS),))
    trace = read(write_trace([recording], tmp_path / "trace.json").path)
    check(trace)
    read_back = [r for r in slices(trace) if r["name"] == "op"]
    assert [int(1000 * r["ts"]) for r in read_back] == [begin for begin, _ in pairs]
    assert [int(1000 * r["dur"]) for r in read_back] == [end - begin for begin, end in pairs]
