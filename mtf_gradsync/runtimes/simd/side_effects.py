"""Side effects of a SIMD program's operations: collectives, writes, and their order."""

from __future__ import annotations

import collections
import re
from typing import Iterable, NamedTuple, Sequence

from mtf_gradsync.extension import TOGETHER_ATTR
from mtf_gradsync.runtimes.simd.graph_facts import (
    CONTROL,
    CalledBranch,
    Context,
    GraphFacts,
    Loop,
    UnsupportedProgramError,
    common_context,
)
from mtf_gradsync.runtimes.simd.randomness import STATELESS

COLLECTIVE_TYPES = ("CrossReplicaSum", "AllToAll", "CollectivePermute", "XlaReduceScatter")


class CollectiveOperation(NamedTuple):
    """A collective operation of a program.

    Attributes:
      name: the operation's name.
      op: the operation's type, one of `COLLECTIVE_TYPES`.
      groups: groups of physical core numbers. The cores of a group have to reach the operation
        together. For ``CollectivePermute``, these are the cores that its pairs connect.
      pairs: for ``CollectivePermute``, pairs of core numbers: a core that sends, and the core that
        receives from it. Empty for other types.
      context: the loops and branches around the operation.
      together: name of the group of sums that the operation belongs to; "" if it is in no group.
    """

    name: str
    op: str
    groups: tuple[tuple[int, ...], ...]
    pairs: tuple[tuple[int, int], ...]
    context: Context
    together: str = ""


def find_collectives(facts: GraphFacts) -> dict[str, CollectiveOperation]:
    """Returns the collectives of all TPU programs in a graph by name, in program order.

    `facts` describes the graph.

    Raises:
      UnsupportedProgramError: when the groups of a collective are not a constant, or not a
        partition of the cores.
    """
    return {
        name: _read(facts, name) for name in facts.order if facts.node[name].op in COLLECTIVE_TYPES
    }


def _read(facts: GraphFacts, name: str) -> CollectiveOperation:
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
        groups = merge_overlapping(pairs)
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
    return CollectiveOperation(name, node.op, groups, pairs, facts.context[name], together)


def _check_pairs(node: object, pairs: tuple[tuple[int, int], ...], cores: int) -> None:
    targets = [b for _, b in pairs]
    if len(set(targets)) != len(targets) or any(not 0 <= c < cores for p in pairs for c in p):
        raise UnsupportedProgramError.of(
            node,
            f"its source-target pairs are {list(pairs)} on {cores} cores",
            f"name each target once, and cores from 0 to {cores - 1}",
        )


def merge_overlapping(groups: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Joins overlapping groups of cores; returns disjoint groups.

    For the groups (0, 1), (1, 2) and (3, 4) the result is ((0, 1, 2), (3, 4)). Each group of the
    result is a sorted tuple of core numbers, and the groups themselves are sorted.
    """
    set_of: dict[int, set[int]] = {}
    for group in groups:
        joined = set(group).union(*(set_of[core] for core in group if core in set_of))
        for core in joined:
            set_of[core] = joined
    return tuple(sorted({tuple(sorted(cores)) for cores in set_of.values()}))


_READS = frozenset(["ReadVariableOp", "ResourceGather", "ResourceGatherNd"])
_QUERIES = frozenset(["VariableShape", "VarIsInitializedOp"])
_OTHER_EFFECTS = frozenset(("Assert", "Print", "PrintV2", *COLLECTIVE_TYPES))
_BOOKKEEPING = frozenset(["Identity", "Enter", "Switch", "Merge", "Exit", "NextIteration"])


class Effects(NamedTuple):
    """The order of a program's side effects, as edges to add to its graph.

    Attributes:
      after: for the name of a node, the nodes of the same program that it has to wait for. A core's
        copy of the node waits for these nodes on the same core.
      after_all_cores: for the name of a node, further nodes that it has to wait for. A core's copy
        of the node waits for these nodes on all cores, because a variable that all cores share is
        written.
      last: for the name of a program, the nodes that have to run before the program is done.
      shared_writes: the nodes that write to variables of which all cores see one copy (a global
        step on the host). All cores compute the same new value, and one core writes it.
    """

    after: dict[str, set[str]]
    after_all_cores: dict[str, set[str]]
    last: dict[str, set[str]]
    shared_writes: set[str]


def find_effects(facts: GraphFacts) -> Effects:
    """Returns edges that keep the side effects of a graph's programs in program order.

    `facts` describes the graph, which is not changed.
    """
    return _EffectFinder(facts).effects


def written_variables(facts: GraphFacts) -> dict[str, list[str]]:
    """Returns the names of the variables that each operation of a program writes.

    `facts` describes the graph with the programs. The result's keys are the names of the
    operations. A variable that holds a slice appears under the name of its Mesh-TF variable.
    Operations that write no variable are not in the result.
    """
    written = {}
    for name in facts.order:
        if name in facts.cluster and facts.node[name].op not in _READS:
            handles = variable_handles(facts, name)
            if handles:
                written[name] = [_variable_name(facts, handle) for handle in handles]
    return written


def _variable_name(facts: GraphFacts, handle: str) -> str:
    if facts.node[handle].op == "TPUReplicatedInput":
        handle = facts.inputs(handle)[0][0]
    if not handle.endswith("_slice_0"):
        return handle
    # Mesh-TF makes slices in a name scope of the variable's own name: "w/w_slice_0", or
    # "w_1/w_slice_0" if "w" is taken; it is, because the master has this name.
    stem = handle[: -len("_slice_0")]
    for slash in re.finditer("/", stem):
        scope, name = stem[: slash.start()], stem[slash.end() :]
        if name and re.search(f"(^|/){re.escape(name)}(_[0-9]+)?$", scope):
            return name
    return stem


def variable_handles(facts: GraphFacts, name: str) -> list[str]:
    """Returns the handles of the variables that the node `name` reads or writes.

    A handle is a ``VarHandleOp``, or a ``TPUReplicatedInput`` of one ``VarHandleOp`` per core.
    """
    op = facts.node[name].op
    if op in _BOOKKEEPING or op in _QUERIES:
        return []
    roots = (facts.root(source) for source, number in facts.inputs(name) if number != CONTROL)
    return [root for root in roots if _is_variable(facts, root)]


def _is_variable(facts: GraphFacts, name: str) -> bool:
    node = facts.node[name]
    if node.op == "TPUReplicatedInput" and node.input:
        return facts.node[facts.inputs(name)[0][0]].op == "VarHandleOp"
    return node.op == "VarHandleOp"


class _EffectFinder:
    def __init__(self, facts: GraphFacts):
        self._facts = facts
        sets: list[dict[str, set[str]]] = [collections.defaultdict(set) for _ in range(3)]
        self.effects = Effects(sets[0], sets[1], sets[2], set())
        self._turns: dict[str, list[str]] = collections.defaultdict(list)
        self._exits: dict[str, list[str]] = collections.defaultdict(list)
        self._merges: dict[tuple[Context, str], list[str]] = collections.defaultdict(list)
        self._find_ends()
        last_write: dict[tuple[str, str], str] = {}
        reads: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        all_reads: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        for name in facts.order:
            if name not in facts.cluster:
                continue
            cluster, op = facts.cluster[name], facts.node[name].op
            handles = variable_handles(facts, name)
            for handle in handles:
                key = (cluster, handle)
                shared = facts.node[handle].op != "TPUReplicatedInput"
                if key in last_write:
                    self._make_wait(name, last_write[key], shared)
                if op in _READS:
                    reads[key].append(name)
                    all_reads[key].append(name)
                    continue
                for read in reads.pop(key, ()):
                    self._make_wait(name, read, shared)
                last_write[key] = name
                if shared:
                    self.effects.shared_writes.add(name)
            if (handles and op not in _READS) or op in _OTHER_EFFECTS:
                self.effects.last[cluster].update(self._nodes_after(name, ()))
            elif op in STATELESS:
                # The iterations of a loop draw their numbers one after the other.
                self._nodes_after(name, ())
        for key in last_write:
            for name in all_reads[key]:
                # A loop's next iteration may write the variable that this iteration reads.
                self._nodes_after(name, ())

    def _find_ends(self) -> None:
        """Fills in `_turns`, `_exits` and `_merges`: where iterations, loops and conditionals end.

        The three attributes are dictionaries with lists of the names of nodes. `_turns` has, for
        each loop, the nodes at the end of an iteration. `_exits` has, for each loop, the nodes at
        the end of the loop. `_merges` has, for each conditional, the nodes at its end.
        """
        facts = self._facts
        for name in facts.order:
            op, context = facts.node[name].op, facts.context[name]
            if op in ("NextIteration", "Exit"):
                loop = [c for c in context if isinstance(c, Loop)][-1]
                (self._turns if op == "NextIteration" else self._exits)[loop.frame].append(name)
            elif op == "Merge":
                for source, number in facts.inputs(name):
                    inner = facts.context_of_output(source, number)
                    side = inner[len(context)] if len(inner) > len(context) else None
                    if isinstance(side, CalledBranch):
                        self._merges[context, side.predicate].append(name)
                        break

    def _make_wait(self, name: str, earlier: str, all_cores: bool) -> None:
        """Adds edges to `effects` that make the node `name` wait for the node `earlier`.

        If `all_cores` is True, `name` waits for the copies of `earlier` on all cores. If it is
        False, `name` waits only for the copy of `earlier` on the same core. If no step runs both
        nodes, no edge is added.
        """
        context, other = self._facts.context[name], self._facts.context[earlier]
        shared = common_context(context, other)
        size = len(shared)
        here = context[size] if len(context) > size else None
        there = other[size] if len(other) > size else None
        if (
            isinstance(here, CalledBranch)
            and isinstance(there, CalledBranch)
            and here.predicate == there.predicate
        ):
            return  # two sides of one conditional: only one of them runs
        after = self.effects.after_all_cores if all_cores else self.effects.after
        for end in self._nodes_after(earlier, shared):
            for begin in self._waiting_nodes(name, shared):
                if begin != end:
                    after[begin].add(end)

    def _nodes_after(self, name: str, context: Context) -> list[str]:
        """Returns nodes that run after the node `name`, even in a step that does not run `name`.

        A node that is not in all loops and branches around `name` can wait for the returned nodes,
        but not for `name` itself.

        Args:
          name: the name of the node.
          context: those loops and branches around `name` that the waiting node is in, too.

        Returns:
          A list of names of nodes. If `context` has all loops and branches around `name`, the list
          has `name` alone. If `context` lacks some loops or branches, the list has the nodes at the
          end of the outermost loop or branch that `context` lacks. Edges that make these nodes wait
          for `name` are added to `effects`. Edges that make the next iterations of the loops around
          `name` wait for `name` are added, too.
        """
        inner = self._facts.context[name]
        ends = [name]
        while len(inner) > len(context):
            around, inner = inner[-1], inner[:-1]
            if isinstance(around, Loop):
                for turn in self._turns[around.frame]:
                    self.effects.after[turn].update(ends)
                ends = self._exits[around.frame]
            else:
                merges = self._merges[inner, around.predicate]
                for merge in merges:
                    self.effects.after[merge].update(ends)
                ends = merges
        return ends

    def _waiting_nodes(self, name: str, context: Context) -> list[str]:
        """Returns the nodes to which edges have to lead so that the node `name` waits.

        The edges come from nodes that are in the loops and branches `context`, and edges cannot
        lead into a further loop. If `name` is in no loop besides the loops in `context`, the
        returned list has `name` itself. If `name` is in a further loop, the list has the ``Enter``
        node by which the variable that `name` uses enters this loop. If there is no ``Enter`` node
        of the variable, the list is empty.
        """
        facts = self._facts
        inner = facts.context[name][len(context) :]
        loops = [i for i, c in enumerate(inner) if isinstance(c, Loop)]
        if not loops:
            return [name]
        # Edges enter a loop only through its Enter nodes: take the handle's Enter node.
        wanted = len(context) + loops[0] + 1
        for source, number in facts.inputs(name):
            while number >= 0:
                node = facts.node[source]
                if node.op == "Enter" and len(facts.context[source]) == wanted:
                    return [source]
                if node.op not in _BOOKKEEPING:
                    break
                source, number = facts.inputs(source)[0]
        return []
