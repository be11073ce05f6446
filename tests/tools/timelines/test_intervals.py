"""Arithmetic of intervals, against intervals worked out by hand."""

import numpy as np
import pytest

from mtf_gradsync.tools.timelines.table import covered, length, minus, shared


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        ([(3, 3)], []),
        ([(5, 9), (1, 2)], [(1, 2), (5, 9)]),
        ([(1, 4), (4, 6)], [(1, 6)]),
        ([(1, 10), (2, 3), (4, 9)], [(1, 10)]),
        ([(2, 5), (1, 3), (4, 8), (9, 10)], [(1, 8), (9, 10)]),
    ],
)
def test_each_moment_counts_once(given, expected):
    assert covered(given) == expected


@pytest.mark.parametrize(
    ("given", "others", "expected"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(2, 3), (5, 7)], [(0, 2), (3, 5), (7, 10)]),
        ([(0, 4), (6, 10)], [(3, 7)], [(0, 3), (7, 10)]),
        ([(2, 4)], [(0, 2), (4, 9)], [(2, 4)]),
        ([(0, 1), (2, 3), (4, 5)], [(0, 9)], []),
    ],
)
def test_what_nothing_hides(given, others, expected):
    assert minus(given, others) == expected


def test_how_long_two_are_at_the_same_time():
    assert shared([(0, 4), (6, 10)], [(3, 7)]) == 2
    assert shared([(0, 4)], [(4, 9)]) == 0


def test_as_counting_moments_one_by_one():
    random = np.random.RandomState(0)
    for _ in range(30):
        a, b = (
            [
                (int(x), int(x + d))
                for x, d in zip(random.randint(0, 40, 6), random.randint(0, 9, 6))
            ]
            for _ in range(2)
        )
        moments = [{t for begin, end in one for t in range(begin, end)} for one in (a, b)]
        assert length(covered(a)) == len(moments[0])
        assert length(minus(covered(a), covered(b))) == len(moments[0] - moments[1])
        assert shared(covered(a), covered(b)) == len(moments[0] & moments[1])
