"""Rebuilds a graph with functions in place of the loops and conditionals of control flow v1.

TensorFlow's bridge to XLA has no kernels for ``Switch``, ``Merge`` and ``Enter``, the operations of
control flow v1. The bridge needs ``While`` and ``If``, whose bodies are functions.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Callable, Hashable, Mapping, MutableMapping, Sequence, Tuple

from mtf_gradsync.extension import tf
from mtf_gradsync.runtimes.simd.graph_facts import (
    CONTROL,
    CalledBranch,
    Context,
    CycleError,
    GraphFacts,
    Loop,
    num_iterations,
    reachable,
    sorted_by_needs,
    split_input,
)
from mtf_gradsync.runtimes.simd.graph_writing import GraphWriter

_Values = MutableMapping[Tuple[str, int], Any]
# Replaces an operation: takes its node and its inputs, returns its outputs.
StandIn = Callable[[tf.NodeDef, Sequence[tf.Tensor]], Sequence[tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class _Conditional:
    """A conditional as one item of a function body: all of its nodes are rebuilt together."""

    predicate: str


@dataclasses.dataclass(frozen=True)
class _Single:
    """A single operation as an item of a function body."""

    name: str


def rebuild(
    graph_def: tf.GraphDef,
    given: dict[str, Any],
    fetches: Sequence[str],
    stand_ins: Mapping[str, StandIn] = {},
) -> tuple[list[Any], dict[str, int]]:
    """Rebuilds a graph's operations in the default graph, with functions for loops and branches.

    The default graph has to be a function's graph, with control flow v2 enabled.

    Args:
      graph_def: the graph, whose loops and conditionals are those of control flow version 1.
      given: tensors that take the place of operations' results, by the operation's name.
      fetches: names of tensors ("a:0") and operations ("a") outside loops and conditionals.
      stand_ins: functions that build operations of some types in place of TensorFlow, by type. Each
        function takes an operation's ``NodeDef`` and its inputs, and returns its outputs.

    Returns:
      Two values. The first is the list of the rebuilt fetches, in order. The second is a dict from
      the name of a loop's ``While`` to the loop's number of iterations. It has only the loops for
      which the graph tells this number.
    """
    builder = _Builder(GraphFacts(graph_def), stand_ins)
    level = _FunctionBody(builder, (), values={(name, 0): value for name, value in given.items()})
    level.make([n for n in builder.facts.order if n not in given])
    made = [
        level.values[split_input(fetch)] if ":" in fetch else level.operations[fetch]
        for fetch in fetches
    ]
    return made, {
        name: n for name, (n, *others) in builder.turns.items() if n is not None and not others
    }


class _Builder:
    """The facts about a graph that is rebuilt, which all function bodies of the new graph share."""

    def __init__(self, facts: GraphFacts, stand_ins: Mapping[str, StandIn]):
        self.facts = facts
        self.stand_ins = stand_ins
        self.position = {name: i for i, name in enumerate(facts.order)}
        self.library = GraphWriter(facts.graph_def).graph_def
        # Name of a While -> numbers of iterations: loops in two branches may share a name.
        self.turns: dict[str, set[int | None]] = collections.defaultdict(set)

    def _is_merge(self, name: str) -> bool:
        return self.facts.node[name].op == "Merge"

    def is_loop_variable(self, name: str) -> bool:
        """Returns whether the node `name` is the ``Merge`` that gives a loop variable's value.

        A loop's ``Merge`` begins each iteration. In the first iteration, its value is the initial
        value of the loop variable; in every later iteration, it is the value that the iteration
        before has computed.
        """
        return self._is_merge(name) and any(
            self.facts.is_back_edge(source, name) for source, _ in self.facts.inputs(name)
        )

    def next_value(self, variable: str) -> str:
        """Returns the ``NextIteration`` node that gives a loop variable its next value.

        `variable` is the name of the ``Merge`` node that gives the loop variable's value in each
        iteration.
        """
        sources = (source for source, _ in self.facts.inputs(variable))
        return next(s for s in sources if self.facts.is_back_edge(s, variable))

    def item_of(self, name: str, around: Context) -> Hashable:
        """Returns the item of a function body that has the node `name`.

        An item is a single operation (`_Single`), a whole loop (`Loop`) or a whole conditional
        (`_Conditional`). `around` is the loops and branches around the function body.
        """
        facts, depth = self.facts, len(around)
        context = facts.context[name]
        if len(context) > depth:
            inner = context[depth]
            return inner if isinstance(inner, Loop) else _Conditional(inner.predicate)
        if facts.is_conditional_switch(name):
            return _Conditional(facts.predicate_of(name))
        if self._is_merge(name) and not self.is_loop_variable(name):
            return _Conditional(self.branch_of(*facts.inputs(name)[0], depth).predicate)
        return _Single(name)

    def branch_of(self, source: str, number: int, depth: int) -> CalledBranch:
        """Returns the branch of a conditional that computes an input of its ``Merge``.

        The input is output `number` of the node `source`; `depth` is the number of loops and
        branches around the conditional.
        """
        side = self.facts.context_of_output(source, number)[depth]
        assert isinstance(side, CalledBranch)
        return side

    def needed_for(self, wanted: Sequence[str], around: Context) -> list[str]:
        """Returns `wanted` and all nodes of the same iteration that they need, in program order.

        `wanted` are names of nodes in the body of a loop. `around` is the loops and branches around
        the loop, and the loop itself.
        """

        def inputs(name: str) -> list[str]:
            return [s for s, _ in self.facts.inputs(name) if self._is_in_iteration(s, around)]

        found = reachable([n for n in wanted if self._is_in_iteration(n, around)], inputs)
        return sorted(found, key=self.position.__getitem__)

    def _is_in_iteration(self, name: str, around: Context) -> bool:
        """Returns whether the node `name` is computed in each iteration of a loop.

        The result is False for nodes outside the loop, and for nodes that only carry a value into
        an iteration. `around` is the loops and branches around the loop, and the loop itself.
        """
        context, op = self.facts.context[name], self.facts.node[name].op
        if context != around:
            return context[: len(around)] == around
        if op == "Switch":
            return not self.facts.is_loop_switch(name)
        return op != "Enter" and not self.is_loop_variable(name)


class _FunctionBody:
    """The body of one function: the whole program, a branch, or a loop's condition or body."""

    def __init__(
        self,
        builder: _Builder,
        around: Context,
        values: _Values,
        outer: _FunctionBody | None = None,
    ):
        self._builder = builder
        self._around = around
        self._outer = outer
        self.values: _Values = collections.ChainMap(values, *([outer.values] if outer else []))
        self.operations: dict[str, tf.Operation] = {}
        if len(builder.library.library.function):
            tf.import_graph_def(builder.library, name="")

    def make(self, names: Sequence[str]) -> None:
        """Rebuilds the nodes that `names` names in this function body.

        Loops and conditionals in the body become calls of other functions, whose bodies are made,
        too.
        """
        for item, members in self._sorted_items(names):
            if isinstance(item, _Single):
                self._make_operation(item.name)
            elif isinstance(item, Loop):
                self._make_loop(item, members)
            elif isinstance(item, _Conditional):
                self._make_conditional(item, members)

    def _sorted_items(self, names: Sequence[str]) -> list[tuple[Hashable, list[str]]]:
        """Returns the items of this body, each with its nodes, sorted by what they need.

        `names` are the names of the nodes of this body. An item is an operation, a loop or a
        conditional.
        An item comes after the items that it needs. Items that do not need each other are in the
        order of their creation.
        """
        builder = self._builder
        members: dict[Hashable, list[str]] = {}
        item_of = {}
        for name in names:
            item_of[name] = builder.item_of(name, self._around)
            members.setdefault(item_of[name], []).append(name)
        needs: dict[Hashable, set[Hashable]] = {item: set() for item in members}
        for name in names:
            item = item_of[name]
            found = {item_of.get(source, item) for source, _ in builder.facts.inputs(name)}
            needs[item] |= found - {item}
        try:
            return [(item, members[item]) for item in sorted_by_needs(needs)]
        except CycleError as error:
            stuck = [members[item][0] for item in error.cycle[:5]]
            raise ValueError(
                f"Loops and conditionals near {stuck} wait for each other; build each with one "
                "tf.cond or tf.while_loop of its own."
            ) from None

    def _make_operation(self, name: str) -> None:
        node = self._builder.facts.node[name]
        inputs = self._builder.facts.inputs(name)
        data = [self.values[s, k] for s, k in inputs if k != CONTROL]
        stand_in = self._builder.stand_ins.get(node.op)
        with tf.control_dependencies(self._control_inputs([name])):
            outputs = stand_in(node, data) if stand_in else None
            made = outputs[0].op if outputs else _copied(node, data)
        outputs = outputs or made.outputs
        self.operations[name] = made
        for number, tensor in enumerate(outputs):
            self.values[name, number] = tensor

    def _control_inputs(self, members: Sequence[str]) -> list[tf.Operation]:
        """Returns the rebuilt operations of this body that are control inputs of some nodes.

        `members` are the names of the nodes that have the control inputs. Control inputs that are
        members themselves are left out.
        """
        sources = {
            source: None
            for name in members
            for source, number in self._builder.facts.inputs(name)
            if number == CONTROL
        }
        for name in members:
            sources.pop(name, None)
        # Operations of an outer level have run before this level's function.
        return [self.operations[s] for s in sources if s in self.operations]

    def _make_conditional(self, item: _Conditional, members: Sequence[str]) -> None:
        builder, depth = self._builder, len(self._around)
        facts = builder.facts
        here = [n for n in members if facts.context[n] == self._around]
        switches = [n for n in here if facts.is_conditional_switch(n)]
        merges = [n for n in here if facts.node[n].op == "Merge"]

        def side(taken: bool) -> Any:
            around = (*self._around, CalledBranch(item.predicate, taken))

            def body() -> list[Any]:
                values = {(n, int(taken)): self.values[facts.inputs(n)[0]] for n in switches}
                level = _FunctionBody(builder, around, values, outer=self)
                level.make([n for n in members if facts.context[n][: depth + 1] == around])
                results = [
                    level.values[source, number]
                    for merge in merges
                    for source, number in facts.inputs(merge)
                    if number != CONTROL and builder.branch_of(source, number, depth).taken is taken
                ]
                with tf.control_dependencies(level._control_inputs(merges)):
                    return [tf.identity(r) for r in results]

            return body

        predicate = self.values[split_input(item.predicate)]
        with tf.control_dependencies(self._control_inputs(members)):
            results = _functional().cond(predicate, side(True), side(False))
        for merge, result in zip(merges, tf.nest.flatten(results)):
            self.values[merge, 0] = result
            self.values[merge, 1] = tf.cast(predicate, tf.int32)
            self.operations[merge] = result.op

    def _make_loop(self, loop: Loop, members: Sequence[str]) -> None:
        builder, facts = self._builder, self._builder.facts
        around = (*self._around, loop)
        here = [n for n in members if facts.context[n] == around]
        variables = [n for n in here if builder.is_loop_variable(n)]
        test = next(n for n in here if facts.node[n].op == "LoopCond")
        switches = [n for n in here if facts.node[n].op == "Switch" and facts.is_loop_switch(n)]
        variable_of = {s: facts.inputs(s)[0][0] for s in switches}

        def iteration(values: Sequence[Any], wanted: Sequence[str]) -> _FunctionBody:
            """Returns the function body of one iteration, in which the nodes `wanted` are rebuilt.

            `values` are the values of the loop variables at the beginning of the iteration, in the
            order of `variables`.
            """
            given: _Values = {(v, 0): value for v, value in zip(variables, values)}
            given.update({(s, 1): given[v, 0] for s, v in variable_of.items()})
            for name in here:
                if facts.node[name].op == "Enter":
                    given.setdefault((name, 0), self.values[facts.inputs(name)[0]])
            level = _FunctionBody(builder, around, given, outer=self)
            level.make(builder.needed_for(wanted, around))
            return level

        def condition(*values: Any) -> Any:
            return iteration(values, [test]).values[test, 0]

        def body(*values: Any) -> list[Any]:
            nexts = [builder.next_value(v) for v in variables]
            level = iteration(values, nexts)
            with tf.control_dependencies([level.operations[n] for n in nexts]):
                return [tf.identity(level.values[n, 0]) for n in nexts]

        enters = [
            next(s for s, _ in facts.inputs(v) if facts.node[s].op == "Enter") for v in variables
        ]
        with tf.control_dependencies(self._control_inputs(members)):
            first = [tf.identity(self.values[facts.inputs(e)[0]]) for e in enters]
            results = _functional().while_loop(condition, body, first)
        made = results[0].op
        while made.type not in ("While", "StatelessWhile"):  # some versions return identities
            made = made.inputs[0].op
        builder.turns[made.name].add(num_iterations(facts, loop))
        result_of = dict(zip(variables, results))
        for name in here:
            if facts.node[name].op == "Exit":
                result = result_of[variable_of[facts.inputs(name)[0][0]]]
                self.values[name, 0] = result
                self.operations[name] = result.op


def _copied(node: tf.NodeDef, data: Sequence[tf.Tensor]) -> tf.Operation:
    op, attrs = node.op, dict(node.attr)
    if op in ("LoopCond", "NextIteration"):
        # At the end of an iteration, a loop's function just returns a value.
        op, attrs = "Identity", {"T": tf.AttrValue(type=data[0].dtype.as_datatype_enum)}
    return tf.get_default_graph().create_op(
        op, list(data), attrs=attrs, name=node.name, compute_device=False
    )


def _functional() -> Any:
    """Returns TensorFlow 2's module with ``cond`` and ``while_loop``.

    The functions ``cond`` and ``while_loop`` in ``tf.compat.v1`` are not used, because what they
    build depends on a global switch.
    """
    import tensorflow as tf2

    return tf2
