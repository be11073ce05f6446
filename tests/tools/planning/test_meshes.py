"""Which mesh shapes a number of cores can have."""

import pytest

from mtf_gradsync.tools import planning
from mtf_gradsync.tools.planning.machines import shapes_of


def test_all_factorizations_over_two_axes():
    shapes = ["batch:4;model:1", "batch:2;model:2", "batch:1;model:4"]
    assert planning.factorizations(4, ["batch", "model"]) == shapes


def test_all_factorizations_over_three_axes():
    # 12 = 2 * 2 * 3: six ways to place the twos, three to place the three.
    shapes = planning.factorizations(12, ["a", "b", "c"])
    assert len(shapes) == len(set(shapes)) == 18
    assert shapes[0] == "a:12;b:1;c:1"


@pytest.mark.parametrize(("cores", "axes"), [(4, []), (4, ["a", "a"]), (0, ["a"])])
def test_what_cannot_be_is_an_error(cores, axes):
    with pytest.raises(ValueError, match="must be"):
        planning.factorizations(cores, axes)


def test_of_several_slices_each_axis_that_they_divide_crosses_the_network_once():
    assert shapes_of(4, ["a", "b"], 1) == planning.factorizations(4, ["a", "b"])
    assert shapes_of(4, ["a", "b"], 2) == ["a:4;b:1", "a:2;b:2", "b:2;a:2", "b:4;a:1"]
    # Where they divide none, the plan says so.
    assert shapes_of(6, ["a", "b"], 6) == ["a:6;b:1", "a:3;b:2", "a:2;b:3", "b:6;a:1"]
