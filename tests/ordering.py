"""Whether a graph says which of a variable's reads and writes come first."""

from __future__ import annotations

import collections
from typing import Any, Iterable, Iterator, NamedTuple

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import tf

_WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceStridedSliceAssign")
_NEITHER = frozenset(["VarIsInitializedOp", "VariableShape"])
_BOOKKEEPING = frozenset(["Identity", "Enter", "Switch"])


class Race(NamedTuple):
    """A write, and another access of the same variable that may come before it or after it."""

    variable: str
    write: str
    other: str


def races(fetched: Iterable[tf.Operation]) -> list[Race]:
    """Finds what one run of some operations leaves open.

    Args:
      fetched: operations that are run together.

    Returns:
      Each write of a resource variable with each other access of it that no path of edges orders.
    """
    order = _all_that_runs(fetched)
    accesses: dict[tf.Operation, list[tf.Operation]] = collections.defaultdict(list)
    for op in order:
        if op.type not in _NEITHER | _BOOKKEEPING:
            for variable in _variables(op):
                accesses[variable].append(op)
    written = {
        variable: writes
        for variable, ops in accesses.items()
        if (writes := [op for op in ops if op.type.startswith(_WRITES)])
    }
    bits = {op: 1 << i for i, op in enumerate(o for v in written for o in accesses[v])}
    before = _before(order, bits)
    return [
        Race(variable.name, write.name, other.name)
        for variable, writes in written.items()
        for write in writes
        for other in accesses[variable]
        if other is not write
        and not before[write] & bits[other]
        and not before[other] & bits[write]
    ]


def races_on_replicas(program: simd.Program, lowering: Any = None) -> list[Race]:
    """What a SIMD program leaves open on CPU replicas."""
    prepared = program.emulated(lowering)
    ends = prepared.emulated.done.values()
    return races([prepared.graph.get_operation_by_name(name) for name in ends])


def settle(fetched: Iterable[tf.Operation]) -> None:
    """Makes writes wait for the reads that they race with, as bare Mesh-TensorFlow's updates do.

    Args:
      fetched: operations that will be run together, before a session has seen them.
    """
    fetched = list(fetched)
    for race in races(fetched):
        by_name = fetched[0].graph.get_operation_by_name
        write, other = by_name(race.write), by_name(race.other)
        assert not other.type.startswith(_WRITES), race
        ends, context = [other], other._get_control_flow_context()
        while context is not None:
            if context.IsWhileContext():
                ends = [tensor.op for tensor in context.loop_exits]
            context = context.outer_context
        write._add_control_inputs(ends)


def _needs(op: tf.Operation) -> Iterator[tf.Operation]:
    yield from (tensor.op for tensor in op.inputs)
    yield from op.control_inputs


def _all_that_runs(fetched: Iterable[tf.Operation]) -> list[tf.Operation]:
    """As the graph has made them, which is in order but for the turns of loops."""
    found = set(fetched)
    todo = list(found)
    while todo:
        for op in _needs(todo.pop()):
            if op not in found:
                found.add(op)
                todo.append(op)
    return [op for op in next(iter(found)).graph.get_operations() if op in found]


def _variables(op: tf.Operation) -> Iterator[tf.Operation]:
    for tensor in op.inputs:
        if tensor.dtype == tf.resource:
            while tensor.op.type in _BOOKKEEPING:
                tensor = tensor.op.inputs[0]
            if tensor.op.type == "VarHandleOp":
                yield tensor.op


def _before(order: list[tf.Operation], bits: dict[tf.Operation, int]) -> dict[tf.Operation, int]:
    """For each operation the bits of all that it has to wait for."""
    before = dict.fromkeys(order, 0)
    changed = True
    while changed:
        changed = False
        for op in order:
            found = 0
            for need in _needs(op):
                found |= before[need] | bits.get(need, 0)
            if found != before[op]:
                before[op], changed = found, True
    return before
