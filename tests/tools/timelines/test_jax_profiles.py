"""Profiles of jax, as its versions write them, in a few events made by hand."""

import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from mtf_gradsync.tools._private.profiles import profile_data
from mtf_gradsync.tools.timelines import TimelineError
from mtf_gradsync.tools.timelines.jax_profiles import (
    OperationRun,
    cut_at_first_use,
    innermost_runs,
    read_profile,
)

jax = pytest.importorskip("jax")

START = 1_700_000_000_000_000_000


class Profile:
    """An ``XSpace`` in the making."""

    def __init__(self):
        self.space = xplane_pb2.XSpace()
        environment = self.space.planes.add(name="Task Environment")
        environment.stat_metadata[1].name = "profile_start_time"
        environment.stats.add(metadata_id=1, uint64_value=START)
        self.host = self.plane("/host:CPU")

    def plane(self, name):
        return self.space.planes.add(name=name)

    def event(self, line, plane, name, begin, length=0, **stats):
        """Adds an event; times in nanoseconds."""
        number = len(plane.event_metadata) + 1
        plane.event_metadata[number].name = name
        event = line.events.add(
            metadata_id=number, offset_ps=begin * 1000, duration_ps=length * 1000
        )
        for key, value in stats.items():
            kind = len(plane.stat_metadata) + 1
            plane.stat_metadata[kind].name = key
            if isinstance(value, str):
                text = len(plane.stat_metadata) + 1
                plane.stat_metadata[text].name = value
                event.stats.add(metadata_id=kind, ref_value=text)
            else:
                event.stats.add(metadata_id=kind, int64_value=value)


def runs(space, *args):
    """What is read from a profile, by this jax's ``ProfileData`` where it has one."""
    return read_profile(profile_data(space.SerializeToString()), *args)


def ran(core, execution, operation, begin, end):
    return OperationRun(core, execution, operation, START + begin, START + end)


def test_devices_that_the_profile_names():
    profile = Profile()
    host = profile.host
    first, second = host.lines.add(name="a"), host.lines.add(name="b", timestamp_ns=100)
    known = {"hlo_module": "step", "run_id": -7}
    profile.event(first, host, "dot.1", 10, 5, hlo_op="dot.1", device_ordinal=5, _p=1, **known)
    profile.event(first, host, "end: dot.1", 40, 1, _c=1)
    profile.event(first, host, "Wait for completion", 20, 500, run_id=-7, device_ordinal=5)
    profile.event(second, host, "add", 10, 5, hlo_op="add", device_ordinal=3, **known)
    known["run_id"] = -9
    profile.event(second, host, "add", 30, 5, hlo_op="add", device_ordinal=3, **known)
    profile.event(second, host, "x", 60, 5, hlo_op="x", hlo_module="other", device_ordinal=3)
    assert sorted(runs(profile.space, "step", [3, 5])) == [
        ran(0, 0, "add", 110, 115),
        ran(0, 1, "add", 130, 135),
        ran(1, 0, "dot.1", 10, 40),
    ]


def old_profile(starts):
    """Two cores' programs begun by tasks 1 and 2, the second of which is carried on by task 3."""
    profile = Profile()
    host = profile.host
    main, pool = host.lines.add(name="python"), host.lines.add(name="pool")
    for task, at in starts:
        profile.event(main, host, "ThreadpoolListener::Record", at, _p=task)
    at = 100
    for task in (2, 1, 3):
        profile.event(pool, host, "ThreadpoolListener::StartRegion", at, _c=task)
        if task != 3:
            profile.event(pool, host, "TfrtCpuExecutable::ExecuteHelper", at + 1, 3)
        if task == 2:
            profile.event(pool, host, "ThreadpoolListener::Record", at + 5, _p=3)
        else:
            stats = {"hlo_op": f"dot.{task}", "hlo_module": "step"}
            profile.event(pool, host, "dot", at + 10, 5, **stats)
        profile.event(pool, host, "ThreadpoolListener::StopRegion", at + 20)
        at += 100
    return profile.space


def test_devices_by_who_has_begun_their_programs():
    found = runs(old_profile([(1, 10), (2, 11)]), "step", [0, 1])
    assert sorted(found) == [ran(0, 0, "dot.1", 210, 215), ran(1, 0, "dot.3", 310, 315)]


def test_a_thread_of_unknown_tasks_does_what_a_core_misses():
    profile = Profile()
    profile.space = old_profile([(1, 10), (2, 11)])
    host = profile.space.planes[1]
    lines = {0: host.lines[1], 1: host.lines.add(name="unknown")}
    for core, begin in ((0, 217), (1, 350)):
        stats = {"hlo_op": "add", "hlo_module": "step"}
        profile.event(lines[core], host, "add", begin, 2, **stats)
    found = runs(profile.space, "step", [0, 1])
    assert {ran(0, 0, "add", 217, 219), ran(1, 0, "add", 350, 352)} <= set(found)


def test_a_task_that_goes_on_with_the_next_programs_of_all_devices():
    """Task 2, of core 1, does the second step of both cores, the only one with an update."""
    profile = Profile()
    host = profile.host
    main, pool = host.lines.add(name="python"), host.lines.add(name="pool")
    for task in (1, 2, 3, 4):
        profile.event(main, host, "ThreadpoolListener::Record", task, _p=task)
    begins = {1: {"dot": [110]}, 3: {}, 4: {}, 2: {"dot": [410, 420, 450], "update": [430, 460]}}
    for at, (task, operations) in zip((100, 200, 300, 400), begins.items()):
        profile.event(pool, host, "ThreadpoolListener::StartRegion", at, _c=task)
        profile.event(pool, host, "TfrtCpuExecutable::ExecuteHelper", at + 1, 3)
        for operation, each in operations.items():
            for begin in each:
                stats = {"hlo_op": operation, "hlo_module": "step"}
                profile.event(pool, host, operation, begin, 5, **stats)
        profile.event(pool, host, "ThreadpoolListener::StopRegion", at + 90)
    assert sorted(runs(profile.space, "step", [0, 1])) == [
        ran(0, 0, "dot", 110, 115),
        ran(0, 1, "dot", 420, 425),
        ran(0, 1, "update", 430, 435),
        ran(1, 0, "dot", 410, 415),
        ran(1, 1, "dot", 450, 455),
        ran(1, 1, "update", 460, 465),
    ]


def test_devices_that_nobody_names():
    with pytest.raises(TimelineError, match=r"on which device operations ran .* jax 0\.10 does"):
        runs(old_profile([(1, 10)]), "step", [0, 1, 2])


def test_an_operation_that_a_thread_pool_does():
    profile = Profile()
    host = profile.host
    one, two = host.lines.add(name="one"), host.lines.add(name="two")
    stats = {"hlo_op": "dot", "hlo_module": "step"}
    profile.event(one, host, "dot", 10, 5, **stats)
    profile.event(one, host, "ThreadpoolListener::Record", 12, _p=8)
    profile.event(two, host, "ThreadpoolListener::StartRegion", 20, _c=8)
    profile.event(two, host, "ThreadpoolListener::StopRegion", 90)
    assert runs(profile.space, "step", [0]) == [ran(0, -1, "dot", 10, 90)]


# jax 0.4 writes times since the epoch. As floats, which ProfileData has, they would be rounded.
@pytest.mark.parametrize("clock", [0] if hasattr(jax.profiler, "ProfileData") else [0, START])
def test_planes_of_accelerators(clock):
    profile = Profile()
    for core in (1, 0):
        plane = profile.plane(f"/device:TPU:{core}")
        line = plane.lines.add(name="XLA Ops", timestamp_ns=clock)
        profile.event(line, plane, "%fusion.2 = f32[8] fusion(x)", 10 * core, 5)
        other = plane.lines.add(name="Steps", timestamp_ns=clock)
        profile.event(other, plane, "0", 0, 500)
    plane = profile.plane("/device:GPU:2")
    line = plane.lines.add(name="Stream #13(Compute)", timestamp_ns=clock)
    profile.event(line, plane, "sm80_gemm", 30, 5, hlo_op="dot.1", hlo_module="step")
    profile.event(line, plane, "MemcpyD2D", 40, 5)
    assert sorted(runs(profile.space, "step", [0, 1, 2])) == [
        ran(0, -1, "fusion.2", 0, 5),
        ran(1, -1, "fusion.2", 10, 15),
        ran(2, -1, "dot.1", 30, 35),
    ]


def test_an_empty_profile_has_nothing():
    assert runs(xplane_pb2.XSpace(), "step", [0]) == []


def test_what_stands_in_loops_and_calls_counts_once():
    events = [ran(0, 0, name, 0, 9) for name in ("while.1", "dot", "call.2")]
    inside = {"while.1": {"dot"}, "call.2": {"not in the profile"}}
    assert [one.operation for one in innermost_runs(events, inside)] == ["dot", "call.2"]


def test_an_operation_ends_when_its_result_is_used():
    users = {"dot": {"bitcast"}, "bitcast": {"add", "tuple"}, "add": {"tuple"}}
    events = [
        ran(0, 0, "dot", 0, 90),
        ran(0, 0, "add", 30, 40),
        ran(1, 0, "add", 20, 25),  # another core's
        ran(0, 0, "dot", 50, 70),  # the loop's next turn
        ran(0, 0, "add", 80, 85),
    ]
    ends = [one.end - START for one in cut_at_first_use(events, users)]
    assert ends == [30, 40, 25, 70, 85]
