"""The table of a recording, against numbers worked out by hand."""

import dataclasses
import json

import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.tools.timelines import (
    Collective,
    Recording,
    Step,
    Table,
    Timeline,
    TimelineError,
)
from mtf_gradsync.tools.timelines.recording import check_recorded, steps_until, sums_of_updates
from mtf_gradsync.tools.timelines.table import tabulate_times
from tests.tools.timelines.recordings import MS, event, two_cores


def numbers(times):
    return dataclasses.astuple(times)[1:]


def test_a_core_and_all_of_them():
    table = tabulate_times([two_cores()])
    # step, compute, collectives, exposed, host, idle: means of the two steps.
    # No core runs anything in 0..1, 6..10, 10..12 and 20..30: 17 of 30 ms.
    assert numbers(table.cores[0]) == pytest.approx((15, 4.5, 2.5, 2, 8.5, 0))
    # Alone, core 0 runs in 1..2.
    assert numbers(table.cores[1]) == pytest.approx((15, 1, 5, 5, 8.5, 0.5))
    assert numbers(table.total) == pytest.approx((15, 2.75, 3.75, 3.5, 8.5, 0.25))
    for one in (*table.cores, table.total, table.update, table.other):
        assert one.compute + one.exposed + one.host + one.idle == pytest.approx(one.step)


def test_steps_with_an_update_and_others():
    table = tabulate_times([two_cores()])
    assert (table.steps, table.update_steps) == (2, 1)
    assert numbers(table.other) == pytest.approx((10, 2, 3, 2.5, 5, 0.5))
    assert numbers(table.update) == pytest.approx((20, 3.5, 4.5, 4.5, 12, 0))


def test_steps_that_are_all_alike():
    steps = tuple(dataclasses.replace(s, is_update=None) for s in two_cores().steps)
    table = tabulate_times([two_cores(steps=steps)])
    assert (table.update_steps, table.update, table.other) == (None, None, None)


def test_operations_and_collectives():
    table = tabulate_times([two_cores()])
    # The sums take 3 + 3 + 2 + 7 ms, the products 3 + 1 + 6 + 1, of two cores in two steps.
    found = [(o.name, o.kind, o.milliseconds, o.runs) for o in table.operations]
    assert found == [("sum", "collective", 15 / 4, 1), ("product", "compute", 11 / 4, 1)]
    (row,) = table.collectives
    assert (row.bytes_per_core, row.variables) == (4096, ("w", "v"))
    assert (row.milliseconds, row.exposed) == pytest.approx((15 / 4, 14 / 4))


def test_only_ten_and_those_the_largest():
    events = [event(0, f"sum {i}", i, i + 1, "collective") for i in range(12)]
    recording = two_cores(events=tuple(events), collectives={}, steps=(Step(0, 30 * MS),))
    facts = dataclasses.replace(two_cores().collectives["sum"], bytes_per_core=8)
    table = tabulate_times([dataclasses.replace(recording, collectives={"sum 11": facts})])
    assert len(table.collectives) == len(table.operations) == 10
    assert table.collectives[0].name == "sum 11"


def test_several_processes():
    table = Timeline.of([two_cores(1), two_cores(0)]).table()
    assert [one.core for one in table.cores] == ["core 0", "core 1", "core 2", "core 3"]
    assert numbers(table.total) == pytest.approx(numbers(tabulate_times([two_cores()]).total))
    assert [o.milliseconds for o in table.operations] == [15 / 4, 11 / 4]


def test_parts_that_do_not_fit_together():
    with pytest.raises(TimelineError, match="steps by process are 0: 2 of xla, 1: 1 of xla"):
        Timeline.of([two_cores(0), two_cores(1, steps=(Step(0, MS),))])
    with pytest.raises(TimelineError, match=r"of the same process.* \[0, 0\]"):
        Timeline.of([two_cores(0), two_cores(0)])


def test_text_and_json():
    table = tabulate_times([two_cores()])
    assert Table.from_json(table.to_json()) == table
    assert json.loads(table.to_json())["collectives"][0]["bytes_per_core"] == 4096
    lines = str(table).splitlines()
    assert lines[0] == "2 steps, 1 of them with an update; milliseconds of an average step"
    assert any(line.split()[:4] == ["core", "0", "15.000", "4.500"] for line in lines)
    assert any("4,096" in line and "w, v" in line for line in lines)
    with pytest.raises(TimelineError, match="no table"):
        Table.from_json("[]")


def test_parts_are_kept_as_they_are():
    recording = two_cores()
    assert Recording.from_json(recording.to_json()) == recording
    with pytest.raises(TimelineError, match="no part of a timeline"):
        Recording.from_json('{"format": "another"}')


def test_nothing_recorded_is_an_error():
    with pytest.raises(TimelineError, match="No step was made"):
        check_recorded(two_cores(steps=()), "")
    only_one = tuple(e for e in two_cores().events if e.core == 0)
    with pytest.raises(TimelineError, match=r"no operation of core 1 in 2 steps.*End the other"):
        check_recorded(two_cores(events=only_one), "End the other profiler.")
    with pytest.raises(TimelineError, match="no operation of a core"):
        check_recorded(two_cores(events=(), cores={}), "")


def test_updates_are_steps_with_the_sums_of_an_update():
    recording = two_cores()
    late = [e for e in recording.events if e.name == "product" or e.begin > 10 * MS]
    assert steps_until(0, [30 * MS, 10 * MS], late, {"sum"}) == recording.steps
    assert {s.is_update for s in steps_until(0, [MS], late, set())} == {None}


def test_sums_of_updates_are_for_what_is_trained():
    with tf.Graph().as_default() as graph:
        tf.get_variable("w", [])
        tf.get_variable("state", [], trainable=False)
        tf.get_variable("report", [], trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES])
        found = {
            "both": Collective(4, ("state", "w"), True),
            "always": Collective(4, ("w",), False),
            "state": Collective(4, ("state",), True),
            "report": Collective(4, ("report",), True),
            # Of w, which Mesh-TF keeps in a variable of several.
            "stacked": Collective(4, ("v",), True),
            "nothing": Collective(4, (), True),
            "unknown": Collective(4, None, True),
        }
        assert sums_of_updates(found, graph) == {"both", "stacked"}


def test_updates_that_the_program_counts():
    timeline = Timeline.of([two_cores(steps=(Step(0, MS), Step(MS, 2 * MS)))])
    timeline.mark_updates([4, 4])
    assert [s.is_update for s in timeline.recordings[0].steps] == [None, None]
    timeline.mark_updates([4, 4, 5])
    assert [s.is_update for s in timeline.recordings[0].steps] == [False, True]
