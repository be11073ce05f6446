"""Steps that are built when they are needed, at the latest when their graph is lowered."""

from __future__ import annotations

from typing import Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.step.plan import Plan


class StandIn(mtf.Operation):
    """Stands for the operations of a step that is built later."""

    def __init__(self, later: Later, mesh: mtf.Mesh, name: str):
        super().__init__([], mesh=mesh, name=name)
        self.later = later

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        first = self.later.stand_ins[0]
        if first not in lowering.operations:
            done = [lowering.operations[op] for op in self.later.build()]
            lowering.operations[first] = tf.group(*done)
        lowering.operations[self] = lowering.operations[first]


class Later:
    """Operations that are built on demand, or when the graph is lowered; a subclass has `make`."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.stand_ins: list[StandIn] = []  # what callers got in place of the operations
        self._operations: list[mtf.Operation] | None = None
        plan.later += (self,)

    def make(self) -> list[mtf.Operation]:
        """Makes the operations; called once, unless they are undone."""
        raise NotImplementedError

    def build(self) -> list[mtf.Operation]:
        """Returns the operations, which the first call builds.

        Their place in the graph is that of the last stand-in, or behind everything that they are
        computed from.
        """
        # An error may have undone them, with what was being built around them.
        if self._operations is None or self in self.plan.later:
            graph, waiting = self.plan.graph, self.plan.later
            before = set(graph.operations)
            self.plan.later = tuple(x for x in waiting if x is not self)
            try:
                self._operations = self.make()
            except BaseException:
                self.plan.later = waiting
                raise
            self._place(before)
        return self._operations

    def _place(self, before: set[mtf.Operation]) -> None:
        listed, own = self.plan.graph.operations, set(self.stand_ins)
        # What the step itself has put before others stays there.
        count = max((i for i, op in enumerate(listed, 1) if op in before), default=0)
        others, made = listed[:count], listed[count:]
        needed = {x.operation for op in made for x in op.inputs} | own
        end = max((i for i, op in enumerate(others, 1) if op in needed), default=0)
        first = [op for op in others[:end] if op not in own]
        listed[:] = first + made + self.stand_ins + others[end:]


def build_later(graph: mtf.Graph) -> None:
    """Builds all steps of a graph that are still to be built."""
    plan = Plan.of_graph(graph)
    while plan is not None and plan.later:
        plan.later[0].build()


def built(operations: Sequence[mtf.Operation]) -> list[mtf.Operation]:
    """Returns operations with stand-ins replaced by the steps' operations, built if needed."""
    result: dict[mtf.Operation, None] = {}
    for operation in operations:
        is_stand_in = isinstance(operation, StandIn)
        result.update(dict.fromkeys(operation.later.build() if is_stand_in else [operation]))
    return list(result)
