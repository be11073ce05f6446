"""Collectives of a compiled program, by mesh axis."""

import dataclasses

from mtf_gradsync import simd
from mtf_gradsync.runtimes.simd.collectives import groups_by_axes
from mtf_gradsync.runtimes.xla.hlo_collectives import HloCollective
from mtf_gradsync.tools.planning.exchanges import exchanges_of
from tests.tools.planning.machines import LAYOUT, build

ROW = simd.CommunicationRow("CrossReplicaSum", "r", "float32", (2,), 8, "model")


def collective(operation, groups, *inside):
    return HloCollective(operation, "r", 16, groups, "main", inside)


def axes():
    return groups_by_axes(build("batch:2;model:2", LAYOUT).program.mesh_impl)


def test_groups_are_named_by_the_axes_along_which_they_lie():
    compiled = [
        collective("all-reduce", ((0, 2), (1, 3))),
        collective("all-gather", ((0, 1), (2, 3)), "branch true of c"),
        collective("all-reduce", ()),
        collective("collective-permute", ((0, 1), (1, 0))),
        collective("collective-permute", ((0, 1), (1, 3), (3, 2), (2, 0))),
    ]
    found = exchanges_of(compiled, simd.CommunicationReport(()), axes(), 4)
    assert [(e.operation, e.axis) for e in found] == [
        ("all-reduce", "batch"),
        ("all-gather", "model"),
        ("all-reduce", "batch+model"),
        ("collective-permute", "other groups"),
        ("collective-permute", "batch+model"),
    ]
    assert found[2].groups == ((0, 1, 2, 3),)
    assert {e.size for e in found} == {16}


def test_in_loops_the_turns_are_those_of_the_program_before():
    compiled = [collective("all-reduce", ((0, 1), (2, 3)), "body of while.7")]
    rows = (ROW, dataclasses.replace(ROW, loops=("loop",), turns=5))
    (found,) = exchanges_of(compiled, simd.CommunicationReport(rows), axes(), 4)
    assert (found.operation, found.axis, found.size, found.times) == ("all-reduce", "model", 8, 5)
    assert found.groups == ((0, 1), (2, 3))


def test_in_loops_only_those_in_branches_that_run_count():
    in_loop = dataclasses.replace(ROW, loops=("loop",), turns=5)
    branches = {True: 8, False: 12}
    rows = [
        dataclasses.replace(in_loop, branches=(("due", taken),), bytes_per_core=size)
        for taken, size in branches.items()
    ]
    report, named = simd.CommunicationReport((in_loop, *rows)), axes()
    for conditions, size in branches.items():
        found = exchanges_of([], report, named, 4, conditions)
        assert [one.size for one in found] == [8, size]


def test_in_loops_other_groups_are_those_of_the_program_and_one_core_exchanges_nothing():
    in_loop = dataclasses.replace(ROW, loops=("loop",), turns=5)
    rows = [dataclasses.replace(in_loop, group=text) for text in ("[0],[1],[2],[3]", "[0,3],[1,2]")]
    (found,) = exchanges_of([], simd.CommunicationReport(tuple(rows)), axes(), 4)
    assert (found.axis, found.groups, found.times) == ("other groups", ((0, 3), (1, 2)), 5)


def test_of_several_slices_groups_are_those_of_one_and_what_crosses_has_its_own_name():
    # Of batch:4;model:2 over two slices of four cores: batch crosses, 0 1 | 2 3 on each.
    named = groups_by_axes(build("batch:4;model:2", LAYOUT).program.mesh_impl)
    compiled = [
        collective("reduce-scatter", ((0, 2), (1, 3))),
        dataclasses.replace(collective("all-reduce", ()), crosses_slices=True),
        collective("all-gather", ()),
        collective("all-reduce", ((0, 1), (2, 3))),
    ]
    found = exchanges_of(compiled, simd.CommunicationReport(()), named, 8, slices=2)
    assert [(one.operation, one.axis) for one in found] == [
        ("reduce-scatter", "batch"),
        ("all-reduce", "DCN"),
        ("all-gather", "batch+model"),
        ("all-reduce", "model"),
    ]
    assert found[1].groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found[2].groups == ((0, 1, 2, 3),)


def test_in_loops_a_sum_over_slices_is_one_within_each_and_one_between():
    named = groups_by_axes(build("batch:4;model:2", LAYOUT).program.mesh_impl)
    in_loop = dataclasses.replace(ROW, group="batch", bytes_per_core=16, loops=("loop",), turns=3)
    report = simd.CommunicationReport((in_loop, dataclasses.replace(in_loop, group="model")))
    found = exchanges_of([], report, named, 8, slices=2)
    assert [(one.operation, one.axis, one.size, one.times) for one in found] == [
        ("reduce-scatter", "batch", 16, 3),
        ("all-reduce", "DCN", 8, 3),
        ("all-gather", "batch", 8, 3),
        ("all-reduce", "model", 16, 3),
    ]
    assert set(found[0].groups) == {(0, 2), (1, 3), (4, 6), (5, 7)} or set(found[0].groups) == {
        (0, 2), (1, 3)
    }  # fmt: skip
    assert set(found[1].groups) == {(0, 4), (2, 6), (1, 5), (3, 7)}
