"""Facts about the graph of a SIMD program: contexts, constants and loops; errors of programs."""

from __future__ import annotations

import collections
import functools
import heapq
import math
from typing import (
    Any,
    Callable,
    Collection,
    Hashable,
    Iterable,
    Mapping,
    NamedTuple,
    Sequence,
    Tuple,
    TypeVar,
    Union,
)

import graphlib
import numpy as np

from mtf_gradsync.extension import some_of, tf
from mtf_gradsync.runtimes._private.tensorflow import TPU_PROGRAM_ATTR


class UnsupportedProgramError(ValueError):
    """The error of a program with an operation that the chosen runtime cannot run."""

    @classmethod
    def of(cls, node: Any, problem: str, remedy: str) -> UnsupportedProgramError:
        """Returns the error for one operation; its message names the operation and its type.

        Args:
          node: a ``NodeDef``.
          problem: what is wrong with the operation, as in "it stands outside every TPU program".
          remedy: what to do, as in "build it inside simd.tpu_program(...)".
        """
        return cls(
            f"Operation {node.name!r} of type {node.op} cannot run: {problem}. To go on, {remedy}."
        )


class BranchDivergenceError(RuntimeError):
    """The error of cores that took different branches and have to meet; a TPU would wait forever.

    Attributes:
      predicate: name of the predicate tensor in the user's graph.
      values: the predicate's value on each core, by the core's number.
      collectives: names of the operations in the branch or loop that the cores have to reach
        together: collectives, and writes to variables that all cores share.
    """

    def __init__(
        self, kind: str, predicate: str, values: dict[int, bool], collectives: Sequence[str]
    ):
        self.predicate = predicate
        self.values = values
        self.collectives = list(collectives)
        sides = [
            f"{side} on cores {[c for c, v in values.items() if v is side]}"
            for side in (True, False)
        ]
        names = some_of([repr(name) for name in self.collectives])
        super().__init__(
            f"Cores {list(values)} have to reach {names} together, inside a {kind}, but the "
            f"{kind}'s predicate {predicate!r} is {' and '.join(sides)}. On a TPU these cores "
            "would wait for each other forever. Make the predicate the same on all of these cores, "
            "for example by reducing it over their mesh axes first."
        )


_Item = TypeVar("_Item", bound=Hashable)


class CycleError(ValueError):
    """The error of items that need each other in a cycle, so that they cannot be sorted."""

    def __init__(self, cycle: list[Hashable]):
        self.cycle = cycle
        super().__init__(f"These need each other: {cycle}.")


def sorted_by_needs(needs: Mapping[_Item, Collection[_Item]]) -> list[_Item]:
    """Returns items sorted so that each item comes after the items that it needs.

    Items that do not need each other stay in the given order. `needs` maps every item to the items
    that have to come before it. Raises `CycleError` if items need each other.
    """
    items = list(needs)
    place = {item: i for i, item in enumerate(items)}
    sorter = graphlib.TopologicalSorter(needs)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        raise CycleError(error.args[1][:-1]) from None
    ordered: list[_Item] = []
    ready: list[int] = []
    while sorter.is_active():
        for item in sorter.get_ready():
            heapq.heappush(ready, place[item])
        ordered.append(items[heapq.heappop(ready)])
        sorter.done(ordered[-1])
    return ordered


class Loop(NamedTuple):
    """A ``tf.while_loop`` around an operation, identified by the name of its frame."""

    frame: str


class CalledBranch(NamedTuple):
    """One side of a ``tf.cond`` around an operation."""

    predicate: str  # name of the tensor that the conditional tests
    taken: bool  # the predicate's value that runs this side


# The loops and branches around an operation, outermost first.
Context = Tuple[Union[Loop, CalledBranch], ...]

_PASS_THROUGH = frozenset(["Identity", "Enter", "RefEnter", "Switch", "RefSwitch"])
_MERGE = frozenset(["Merge", "RefMerge"])
_NEXT = frozenset(["NextIteration", "RefNextIteration"])
_SWITCH = frozenset(["Switch", "RefSwitch"])
_ENTER = frozenset(["Enter", "RefEnter"])
_EXIT = frozenset(["Exit", "RefExit"])

CONTROL = -1


def split_input(text: str) -> tuple[str, int]:
    """Splits an input of a ``NodeDef``, such as ``"name:2"``, into a name and an output's number.

    If `text`, the input, is ``"name"``, the number is 0. If it is ``"^name"``, a control input, the
    number is `CONTROL`.
    """
    if text.startswith("^"):
        return text[1:], CONTROL
    name, _, number = text.partition(":")
    return name, int(number or 0)


def reachable(starts: Iterable[_Item], neighbors: Callable[[_Item], Iterable[_Item]]) -> set[_Item]:
    """Returns `starts` and all items to which steps from an item to its `neighbors` lead."""
    found: set[_Item] = set()
    pending = list(starts)
    while pending:
        item = pending.pop()
        if item not in found:
            found.add(item)
            pending.extend(neighbors(item))
    return found


def common_context(one: Context, other: Context) -> Context:
    """Returns the loops and branches that both contexts `one` and `other` have, outermost first."""
    size = 0
    while size < min(len(one), len(other)) and one[size] == other[size]:
        size += 1
    return one[:size]


class GraphFacts:
    """Facts about the operations of a ``GraphDef``, found without running it.

    Attributes:
      node: the ``NodeDef`` of each operation, by name.
      order: the names of all operations. Each operation comes after those that compute its inputs;
        operations that do not need each other are in the order of their creation.
      context: the loops and branches around each operation, by name.
      cluster: the name of the TPU program that an operation belongs to, by the operation's name.
        Operations outside of programs have no entry.
      num_replicas: the number of cores of each TPU program, by the program's name.
    """

    def __init__(self, graph_def: tf.GraphDef):
        self.graph_def = graph_def
        self.node: dict[str, tf.NodeDef] = {n.name: n for n in graph_def.node}
        self.cluster: dict[str, str] = {
            n.name: n.attr[TPU_PROGRAM_ATTR].s.decode()
            for n in graph_def.node
            if TPU_PROGRAM_ATTR in n.attr
        }
        self.num_replicas: dict[str, int] = {
            self.cluster[n.name]: n.attr["num_replicas"].i
            for n in graph_def.node
            if n.op == "TPUReplicateMetadata" and n.name in self.cluster
        }
        self.order: list[str] = []
        self.context: dict[str, Context] = {}
        self._inputs: dict[str, list[tuple[str, int]]] = {
            n.name: [split_input(s) for s in n.input] for n in graph_def.node
        }
        self._consumers: dict[str, list[tuple[str, int]]] | None = None
        self._pivot_predicate = self._find_pivots()
        self._find_contexts()

    def inputs(self, name: str) -> list[tuple[str, int]]:
        """Returns the inputs of the node `name` as pairs (name of a node, number of its output).

        For a control input the number is `CONTROL`.
        """
        return self._inputs[name]

    def consumers(self, name: str) -> list[tuple[str, int]]:
        """Returns the uses of the node `name`, as pairs (name of the node that uses it, number).

        The number says which output of the node is used; it is `CONTROL` if the use is a control
        input.
        """
        if self._consumers is None:
            self._consumers = collections.defaultdict(list)
            for consumer, inputs in self._inputs.items():
                for source, number in inputs:
                    self._consumers[source].append((consumer, number))
        return self._consumers[name]

    def _find_contexts(self) -> None:
        """Computes `order`, and then the `context` of each node from its inputs."""
        needs = {
            name: {s for s, _ in inputs if not self.is_back_edge(s, name)}
            for name, inputs in self._inputs.items()
        }
        try:
            self.order = sorted_by_needs(needs)
        except CycleError as error:
            cycle = ", ".join(map(repr, error.cycle[:5]))
            raise ValueError(f"The graph has a cycle outside while loops, near {cycle}.") from None
        for name in self.order:
            self.context[name] = self._context_of(name)

    def is_back_edge(self, source: str, consumer: str) -> bool:
        """Returns whether `source` passes a value to `consumer` in a loop's next iteration."""
        return self.node[source].op in _NEXT and self.node[consumer].op in _MERGE

    def _context_of(self, name: str) -> Context:
        node = self.node[name]
        found: list[Context] = [
            self.context_of_output(source, number)
            for source, number in self._inputs[name]
            if not self.is_back_edge(source, name)
        ]
        if node.op in _MERGE:
            # Both sides of a conditional meet here; the context that they share is around both.
            return functools.reduce(common_context, found)
        context = max(found, key=len) if found else ()
        if node.op in _ENTER:
            context += (Loop(node.attr["frame_name"].s.decode()),)
        return context

    def context_of_output(self, name: str, number: int) -> Context:
        """Returns the loops and branches in which output `number` of the node `name` exists.

        The loops and branches around an output differ from the node's own context if the node
        begins a branch or ends a loop.
        """
        node, context = self.node[name], self.context[name]
        if node.op in _EXIT:
            while not isinstance(context[-1], Loop):
                context = context[:-1]
            return context[:-1]
        if node.op in _SWITCH and number != CONTROL and not self.is_loop_switch(name):
            return context + (CalledBranch(self.predicate_of(name), number == 1),)
        return context

    def _find_pivots(self) -> dict[str, str]:
        """Returns a name that identifies each conditional, by the name of its first ``Switch``.

        The name is that of an ``Identity`` node, which passes the conditional's predicate on. All
        ``Switch`` nodes of the conditional except for the first test the output of this node.
        """
        # tf.cond makes Switch(p, p), on which operations without inputs depend, and right after it
        # Identity(p), which all other Switch nodes test. Several conditionals may share p.
        found: dict[str, str] = {}
        open_pivots: dict[str, list[str]] = collections.defaultdict(list)
        for node in self.graph_def.node:
            if node.op == "Switch" and node.input[0] == node.input[1]:
                open_pivots[node.input[1]].append(node.name)
            elif node.op == "Identity" and open_pivots.get(node.input[0]):
                found[open_pivots[node.input[0]].pop()] = node.name
        return found

    def predicate_of(self, name: str) -> str:
        """Returns the predicate of the conditional that the ``Switch`` `name` belongs to.

        The predicate is returned as the text of a ``NodeDef``'s input. The text is the same for all
        nodes of the conditional.
        """
        return self._pivot_predicate.get(name, self.node[name].input[1])

    def is_loop_switch(self, name: str) -> bool:
        """Returns whether the ``Switch`` `name` belongs to a while loop, not to a conditional."""
        return self.node[self._inputs[name][1][0]].op == "LoopCond"

    def is_conditional_switch(self, name: str) -> bool:
        """Returns whether the node `name` is the ``Switch`` of a conditional, not of a loop."""
        return self.node[name].op in _SWITCH and not self.is_loop_switch(name)

    @functools.cached_property
    def condition_of(self) -> dict[Loop, str]:
        """The name of each loop's ``LoopCond`` node, which tests whether the loop goes on."""
        return {self.loop_of(n): n for n in self.order if self.node[n].op == "LoopCond"}

    def loop_of(self, name: str) -> Loop:
        """Returns the innermost loop around the node `name`.

        The node must be in a loop, and in no conditional inside this loop.
        """
        loop = self.context[name][-1]
        assert isinstance(loop, Loop)
        return loop

    def root(self, name: str) -> str:
        """Returns the name of the node that computed the value of the node `name`.

        The result is `name` itself, unless the node `name` only passes its first input on, as an
        ``Identity`` does.
        """
        while self.node[name].op in _PASS_THROUGH:
            name = self._inputs[name][0][0]
        return name

    def constant(self, name: str) -> np.ndarray | None:
        """Returns the value of the node `name` if it is a constant or only passes a constant on.

        For all other nodes the result is None.
        """
        node = self.node[self.root(name)]
        if node.op != "Const":
            return None
        return tf.make_ndarray(node.attr["value"].tensor)


def runs_in_context(facts: GraphFacts, context: Context) -> int | None:
    """Returns how many times a step runs an operation; None if that is unknown.

    `context` is the loops and branches around the operation, and `facts` describes its graph. All
    branches count as taken.
    """
    turns = [num_iterations(facts, loop) for loop in context if isinstance(loop, Loop)]
    return None if None in turns else math.prod(n for n in turns if n is not None)


def num_iterations(facts: GraphFacts, loop: Loop) -> int | None:
    """Returns a loop's number of iterations; None if it is not known from constants in the graph.

    The number is known if the loop counts from a constant to a constant, by a constant step.
    `facts` describes the graph.
    """
    test = facts.inputs(facts.condition_of[loop])[0][0]
    if facts.node[test].op != "Less":
        return None
    counter, limit = (source for source, _ in facts.inputs(test)[:2])
    end = facts.constant(limit)
    if facts.node[counter].op != "Merge" or end is None:
        return None
    first, step = None, None
    for source, _ in facts.inputs(counter):
        if facts.node[source].op == "Enter":
            first = facts.constant(source)
        elif facts.node[source].op == "NextIteration":
            step = _added_constant(facts, facts.inputs(source)[0][0])
    if first is None or not step or step < 0:
        return None
    return max(0, math.ceil((float(end) - float(first)) / step))


def _added_constant(facts: GraphFacts, name: str) -> float | None:
    """Returns the scalar constant that the node `name` of a graph adds to its other input.

    The result is None if the node is no addition, or does not have exactly one constant input.
    """
    if facts.node[name].op not in ("Add", "AddV2"):
        return None
    values = [facts.constant(source) for source, number in facts.inputs(name) if number >= 0]
    found = [float(v) for v in values if v is not None and v.ndim == 0]
    return found[0] if len(found) == 1 else None


def check_fetchable(facts: GraphFacts, name: str, number: int) -> None:
    """Raises ValueError if output `number` of the node `name` exists only in a loop or branch."""
    if facts.context_of_output(name, number):
        raise ValueError(
            f"{name!r} cannot be fetched: it stands inside a loop or conditional of the program. "
            "Fetch what the loop or conditional returns."
        )
