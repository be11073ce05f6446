"""Names of operations of compiled programs."""

import pytest

from mtf_gradsync.timelines.programs import _name, _parts


@pytest.mark.parametrize(
    ("given", "parts", "shown"),
    [
        ("a/b", ["a/b"], "a/b"),
        ("a/parallel_0_1/b", ["a/parallel_0_1/b"], "a/b"),
        ("sums/pack_0/Placeholder_2", ["sums/pack_0/Placeholder_2"], "sums/pack_0"),
        ("(a:b/c)", ["a", "b/c"], "a and 1 more"),
        ("x/(a:b:c)", ["x/a", "x/b", "x/c"], "x/a and 2 more"),
    ],
)
def test_names_that_the_graph_has(given, parts, shown):
    assert _parts(given) == parts
    assert _name(given) == shown
