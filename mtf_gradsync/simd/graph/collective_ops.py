"""Reads the collective operations of a TPU program, and which cores take part."""

from __future__ import annotations

from typing import Iterable, NamedTuple, Sequence

from mtf_gradsync._private.tensorflow import TOGETHER_ATTR
from mtf_gradsync.simd.errors import UnsupportedProgramError
from mtf_gradsync.simd.graph.facts import Context, GraphFacts

COLLECTIVE_TYPES = ("CrossReplicaSum", "AllToAll", "CollectivePermute", "XlaReduceScatter")


class Collective(NamedTuple):
    """One collective operation of a program.

    Attributes:
      op: one of `COLLECTIVE_TYPES`.
      groups: physical core numbers that have to reach the operation together: for
        ``CollectivePermute``, those that its pairs connect.
      pairs: ``CollectivePermute`` only: (source, target) core numbers.
      together: name of its group of sums; "" for a sum that is in none.
    """

    name: str
    op: str
    groups: tuple[tuple[int, ...], ...]
    pairs: tuple[tuple[int, int], ...]
    context: Context
    together: str = ""

    def group_of(self, core: int) -> tuple[int, ...]:
        """Returns the group that a core belongs to, itself included."""
        return next(group for group in self.groups if core in group)


def find_collectives(facts: GraphFacts) -> dict[str, Collective]:
    """Returns every collective of every TPU program in a graph by name, in program order.

    Raises:
      UnsupportedProgramError: when groups are not a constant, or not a partition of the cores.
    """
    return {
        name: _read(facts, name) for name in facts.order if facts.node[name].op in COLLECTIVE_TYPES
    }


def _read(facts: GraphFacts, name: str) -> Collective:
    node = facts.node[name]
    if name not in facts.cluster:
        raise UnsupportedProgramError.of(
            node, "it stands outside every TPU program", "build it inside simd.tpu_program(...)"
        )
    cores = facts.num_replicas[facts.cluster[name]]
    value = facts.constant(facts.inputs(name)[1][0])
    if value is None:
        raise UnsupportedProgramError.of(
            node, "its groups are not a constant", "give the group assignment as Python lists"
        )
    lists = value.tolist()
    if node.op == "CollectivePermute":
        pairs = tuple((int(a), int(b)) for a, b in lists)
        _check_pairs(node, pairs, cores)
        groups = connected(pairs)
    else:
        pairs = ()
        # TensorFlow's kernel takes an empty assignment as one group of all cores.
        groups = tuple(tuple(int(c) for c in g) for g in lists if g) or (tuple(range(cores)),)
        if sorted(c for g in groups for c in g) != list(range(cores)):
            raise UnsupportedProgramError.of(
                node,
                f"its groups {lists} do not hold each of the {cores} cores once",
                "give every core exactly one group",
            )
    if node.op == "AllToAll":
        parts = node.attr["split_count"].i
        if any(len(g) != parts for g in groups):
            raise UnsupportedProgramError.of(
                node,
                f"split_count is {parts} and its groups are {lists}",
                "make every group as large as split_count",
            )
    together = node.attr[TOGETHER_ATTR].s.decode() if TOGETHER_ATTR in node.attr else ""
    return Collective(name, node.op, groups, pairs, facts.context[name], together)


def _check_pairs(node: object, pairs: tuple[tuple[int, int], ...], cores: int) -> None:
    targets = [b for _, b in pairs]
    if len(set(targets)) != len(targets) or any(not 0 <= c < cores for p in pairs for c in p):
        raise UnsupportedProgramError.of(
            node,
            f"its source-target pairs are {list(pairs)} on {cores} cores",
            f"name each target once, and cores from 0 to {cores - 1}",
        )


def connected(groups: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Returns the sorted, disjoint sets of cores that groups, which may overlap, connect."""
    set_of: dict[int, set[int]] = {}
    for group in groups:
        joined = set(group).union(*(set_of[core] for core in group if core in set_of))
        for core in joined:
            set_of[core] = joined
    return tuple(sorted({tuple(sorted(cores)) for cores in set_of.values()}))
