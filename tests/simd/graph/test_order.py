"""Orders in which everything comes after what it needs."""

import pytest

from mtf_gradsync.simd.graph.order import CycleError, in_order


def test_items_that_need_nothing_stay_in_order():
    assert in_order({"c": (), "a": (), "b": ()}) == ["c", "a", "b"]
    assert in_order({}) == []


def test_an_item_waits_for_what_it_needs_and_no_longer():
    needs = {"a": ["d"], "b": [], "c": ["a"], "d": ["b"], "e": []}
    assert in_order(needs) == ["b", "d", "a", "c", "e"]


def test_items_that_need_each_other_are_named():
    with pytest.raises(CycleError) as caught:
        in_order({"a": [], "b": ["a", "d"], "c": ["b"], "d": ["c"], "e": ["d"]})
    assert sorted(caught.value.cycle) == ["b", "c", "d"]
