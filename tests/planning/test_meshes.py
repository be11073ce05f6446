"""Which mesh shapes a number of cores can have."""

import pytest

from mtf_gradsync import planning


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
