"""Lists what a compiled program's cores exchange in a step, by mesh axis."""

from __future__ import annotations

import json
from typing import Any, Mapping, NamedTuple, Sequence

from mtf_gradsync.simd.traffic import CommunicationReport
from mtf_gradsync.xla.topology.compiled import HloCollective

# The operations of TensorFlow's programs, as HLO calls them.
_HLO_NAMES = {
    "CrossReplicaSum": "all-reduce",
    "AllToAll": "all-to-all",
    "CollectivePermute": "collective-permute",
    "XlaReduceScatter": "reduce-scatter",
}
_OTHER = "other groups"

Groups = Sequence[Sequence[int]]


class Exchange(NamedTuple):
    """One collective of a step."""

    operation: str  # HLO's name of it, as in "all-reduce"
    axis: str  # the mesh axes along which cores exchange data, joined by "+"; or "other groups"
    groups: Groups  # the cores that exchange data, group by group
    size: int  # bytes that each core puts in, each time; 0 if not known
    times: int  # how often it runs in a step


def _connected(groups: Groups) -> frozenset[frozenset[int]]:
    """Returns groups of cores without overlaps: the pairs of a permutation are joined."""
    joined: list[frozenset[int]] = []
    for group in groups:
        touching = [one for one in joined if not one.isdisjoint(group)]
        joined = [one for one in joined if one not in touching]
        joined.append(frozenset(group).union(*touching))
    return frozenset(joined)


def exchanges_of(
    compiled: Sequence[HloCollective],
    report: CommunicationReport,
    axes: Mapping[Any, str],
    cores: int,
) -> list[Exchange]:
    """Returns the collectives of an update step, with how often each runs.

    Collectives outside loops are taken from `compiled`, as the compiler has merged them; those in
    loops from `report`, which is of the program before compilation and says how often a loop turns
    (once if not known). Those of each core with itself are not listed. `axes` is what
    `groups_by_axes` returns; `cores` is their number.
    """
    everyone = (tuple(range(cores)),)
    found = []
    for one in compiled:
        if not one.is_in_loop:
            groups = one.groups or everyone
            axis = axes.get(_connected(groups), _OTHER)
            found.append(Exchange(one.operation, axis, groups, one.bytes_per_core, 1))
    by_axis = {axis: key for key, axis in axes.items()}
    for row in report.rows:
        if row.loops:
            operation = _HLO_NAMES[row.operation]
            axis = row.group if row.group in by_axis else _OTHER
            # Groups that lie along no axes are named by their cores.
            named = by_axis[axis] if axis in by_axis else json.loads(f"[{row.group}]") or everyone
            groups = tuple(sorted(tuple(sorted(group)) for group in named))
            times = 1 if row.turns is None else row.turns
            found.append(Exchange(operation, axis, groups, row.bytes_per_core or 0, times))
    return [one for one in found if any(len(group) > 1 for group in one.groups)]
