"""Lists the collectives of a step: which cores exchange data, how many bytes, and how often."""

from __future__ import annotations

import json
from typing import Any, Mapping, NamedTuple, Sequence

from mtf_gradsync.runtimes.simd.communication import CommunicationReport
from mtf_gradsync.runtimes.simd.side_effects import merge_overlapping
from mtf_gradsync.runtimes.xla.hlo_collectives import HloCollective

# The operations of TensorFlow's programs, as HLO calls them.
_HLO_NAMES = {
    "CrossReplicaSum": "all-reduce",
    "AllToAll": "all-to-all",
    "CollectivePermute": "collective-permute",
    "XlaReduceScatter": "reduce-scatter",
}
_OTHER = "other groups"
#: The name of the data center network in place of a mesh axis.
DCN = "DCN"
Groups = Sequence[Sequence[int]]


class Exchange(NamedTuple):
    """A collective operation in which cores exchange data in a step."""

    operation: str  # HLO's name of it, as in "all-reduce"
    axis: str  # the mesh axes along which cores exchange data, joined by "+"; or "other groups"
    groups: Groups  # the cores that exchange data, group by group
    size: int  # bytes that each core gives to it, each time; 0 if unknown
    times: int  # how often the collective runs in a step


def exchanges_of(
    compiled: Sequence[HloCollective],
    report: CommunicationReport,
    axes: Mapping[Any, str],
    cores: int,
    conditions: bool = True,
    slices: int = 1,
) -> list[Exchange]:
    """Returns the collectives that run in a step, with their cores, bytes and counts.

    Collectives between TPU slices have the axis `DCN` in the result. Collectives whose groups have
    one core each are left out, because no data are exchanged in them.

    Args:
      compiled: the collectives of the compiled program. Collectives outside loops are taken from
        this list, because the compiler may have merged some of them.
      report: the collectives of the program before compilation. Collectives inside loops are taken
        from this report, because it says how many iterations a loop has. A loop counts as one
        iteration if the number is unknown.
      axes: a mapping from the groups of cores along mesh axes (a set of sets of core numbers) to
        the axes' names, joined by "+": what the function `groups_by_axes` returns.
      cores: the number of cores.
      conditions: the value that all conditions of the program have in the step: True in a step with
        the update, and False in a step without it.
      slices: the number of TPU slices that a data center network joins, along the first mesh axis.
    """
    cores_per_slice = cores // slices
    everyone = (tuple(range(cores_per_slice)),)
    found = []
    for one in compiled:
        if one.crosses_slices:
            counterparts = tuple(
                tuple(range(i, cores, cores_per_slice)) for i in range(cores_per_slice)
            )
            found.append(Exchange(one.operation, DCN, counterparts, one.bytes_per_core, 1))
        elif not one.is_in_loop:
            groups = one.groups or everyone
            axis = axes.get(frozenset(map(frozenset, merge_overlapping(groups))))
            # Over many cores, sums are scattered within halves of them first.
            if axis is None and (slices > 1 or one.operation == "reduce-scatter"):
                axis = _axis_around(groups, axes)
            axis = axis or _OTHER
            found.append(Exchange(one.operation, axis, groups, one.bytes_per_core, 1))
    by_axis = {axis: key for key, axis in axes.items()}
    for row in report.rows:
        if row.loops and all(taken is conditions for _, taken in row.branches):
            operation = _HLO_NAMES[row.operation]
            axis = row.group if row.group in by_axis else _OTHER
            # If groups lie along no axes, the report names them by their cores.
            named = by_axis[axis] if axis in by_axis else json.loads(f"[{row.group}]") or everyone
            groups = tuple(sorted(tuple(sorted(group)) for group in named))
            times = 1 if row.turns is None else row.turns
            one_of_loop = Exchange(operation, axis, groups, row.bytes_per_core or 0, times)
            found += _split_by_slice(one_of_loop, cores_per_slice)
    return [one for one in found if any(len(group) > 1 for group in one.groups)]


def _axis_around(groups: Groups, axes: Mapping[Any, str]) -> str | None:
    """Returns the mesh axes along which all the given groups of cores lie.

    A group of cores lies along mesh axes if its cores differ in their positions on these axes only.
    If there are several choices of axes, the choice whose groups have the fewest cores is returned.

    Args:
      groups: the numbers of the cores in each group.
      axes: a mapping from the groups of cores along mesh axes to the names of these axes.

    Returns:
      The names of the axes, joined by "+"; None if the groups lie along no axes.
    """
    around = [
        (max(map(len, key)), axis)
        for key, axis in axes.items()
        if all(any(group >= set(own) for group in key) for own in groups)
    ]
    return min(around)[1] if around else None


def _split_by_slice(one: Exchange, cores_per_slice: int) -> list[Exchange]:
    """Splits a collective into collectives within TPU slices and between them.

    The result has the collectives into which the TPU compiler splits `one`.

    Args:
      one: the collective.
      cores_per_slice: the number of cores in a TPU slice.

    Returns:
      A list with `one` alone if each of its groups lies within a TPU slice. For an all-reduce that
      crosses TPU slices, the list has a reduce-scatter within TPU slices, an all-reduce of the
      scattered parts between TPU slices, and an all-gather within TPU slices. For any other
      collective, the list has this collective twice: within TPU slices, and between TPU slices.
    """
    members = [sum(core // cores_per_slice == group[0] // cores_per_slice for core in group)
               for group in one.groups]  # fmt: skip
    if all(count == len(group) for count, group in zip(members, one.groups)):
        return [one]
    count = max(members)
    within = tuple(
        tuple(x for x in g if x // cores_per_slice == g[0] // cores_per_slice) for g in one.groups
    )
    between = tuple(tuple(g[i::count]) for g in one.groups for i in range(count))
    if one.operation != "all-reduce":
        return [one._replace(groups=within), one._replace(axis=DCN, groups=between)]
    part = one.size // count
    return [
        one._replace(operation="reduce-scatter", groups=within),
        one._replace(axis=DCN, groups=between, size=part),
        one._replace(operation="all-gather", groups=within, size=part),
    ]
