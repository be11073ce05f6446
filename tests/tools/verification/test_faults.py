"""Planted faults are found: the variable, the factor, what brings it in; right programs pass."""

import pytest

from tests.tools.verification.right_programs import RIGHT
from tests.tools.verification.table import ALL, RIGHT_PROGRAMS, judged, verified

# The others take seconds each.
QUICK = ("a loss per shard that is summed",)


def slow(names, quick=()):
    return [pytest.param(n, marks=[] if n in quick else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", slow(ALL, QUICK))
def test_it_is_found(name):
    answer = verified(ALL[name], True)
    found = judged(ALL[name], answer)
    assert found.is_found, str(answer)
    assert not found.wrong, str(answer)


@pytest.mark.parametrize("name", slow(RIGHT_PROGRAMS))
def test_it_is_not_found_where_it_is_not(name):
    answer = verified(ALL[name], False)
    assert answer.is_equal, str(answer)
    assert {line.verdict for line in answer.lines} == {"equal"}, str(answer)


@pytest.mark.parametrize("name", slow(RIGHT))
def test_right_programs_of_other_styles_are_equal(name):
    answer = RIGHT[name]()
    assert answer.is_equal, str(answer)


def test_there_are_as_many_as_the_docs_say():
    assert (len(ALL), len(RIGHT)) == (62, 30)
