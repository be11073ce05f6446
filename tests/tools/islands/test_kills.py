"""Islands and mergers as processes that are killed, in a folder that fails: nothing is lost."""

import pytest

from benchmarks import islands, report


@pytest.mark.slow
def test_no_version_and_no_step_is_lost_when_all_are_killed():
    options = report.Options(rounds=1, quick=False, settings={"kills": 20, "faults": 14})
    (row,) = islands.measure_kills(options).rows
    assert row["islands killed"] + row["mergers killed"] >= 20
    assert row["faults"] >= 14
    assert row["killed"] <= row["islands killed"]
    assert row["contributions merged"] >= row["versions"] - 1 > 1  # the first one is an offer
    assert row["wrong or lost"] == row["unaccounted"] == 0
