"""Islands and mergers as processes that are killed: no version is wrong or lost."""

import pytest

from benchmarks import islands, report


@pytest.mark.slow
def test_no_version_is_wrong_or_lost_when_all_are_killed():
    options = report.Options(rounds=1, quick=False, settings={"kills": 25})
    (row,) = islands.measure_kills(options).rows
    assert row["islands killed"] + row["mergers killed"] >= 25
    assert row["contributions merged"] >= row["versions"] - 1 > 1  # the first one is an offer
    assert row["wrong or lost"] == 0
