"""Names of operations of compiled programs."""

import pytest

from mtf_gradsync.tools.timelines.xla_steps import _parts, _shown_name


@pytest.mark.parametrize(
    ("given", "parts", "shown"),
    [
        ("a/b", ["a/b"], "a/b"),
        ("a/parallel_0_1/b", ["a/parallel_0_1/b"], "a/b"),
        ("(a:b/c)", ["a", "b/c"], "a and 1 more"),
        ("x/(a:b:c)", ["x/a", "x/b", "x/c"], "x/a and 2 more"),
    ],
)
def test_names_that_the_graph_has(given, parts, shown):
    assert _parts(given) == parts
    assert _shown_name(given) == shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("cond/cond_1/conditional/cond/sum", "conditional/cond/sum"),
        ("cond/(conditional/cond/sum:b)", "conditional/cond/sum and 1 more"),
        ("cond/parallel_0/b", "b"),
        ("(cond/sums/x:cond/parallel_0/b)", "sums/x and 1 more"),
        ("cond/other", "cond/other"),
        ("cond", "cond"),
    ],
)
def test_names_in_branches(given, shown):
    nodes = {"conditional/cond/sum", "b", "parallel_0/b", "sums/x"}
    assert _shown_name(given, nodes) == shown
