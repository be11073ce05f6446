"""Islands and mergers as processes that are killed: no version is wrong or lost."""

import pytest

from benchmarks import islands, report


@pytest.mark.slow
def test_no_version_is_wrong_or_lost_when_all_are_killed():
    (row,) = islands.measure_kills(report.Options(rounds=1, quick=True)).rows
    assert row["islands killed"] + row["mergers killed"] >= 5
    assert row["contributions merged"] > row["versions"] / 2 > 1
    assert row["wrong or lost"] == 0
