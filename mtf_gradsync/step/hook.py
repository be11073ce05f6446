"""The one hook into the lowering: operations that ask the plan of their graph how to be lowered."""

from __future__ import annotations

import functools
from typing import Any, Iterator

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import loop_body, loop_condition


class Planned:
    """Mixed into the class of every operation of a graph that has a plan.

    The object stays the same, so that Mesh-TF's rewriting (autostack, combined assignments) and
    whoever holds it still find it. A copy of it, as `mtf.recompute_grad` makes, asks the plan too.
    """

    graph: mtf.Graph

    def lower(self, lowering: mtf.Lowering) -> None:
        """Asks the plan."""
        vars(self.graph)[PLAN].lower(self, lowering)

    def lower_itself(self, lowering: mtf.Lowering) -> None:
        """What the operation would do without a plan."""
        super().lower(lowering)  # type: ignore[misc]  # of the class that it is mixed into


# Where a graph keeps its plan.
PLAN = "mtf_gradsync_plan"


@functools.lru_cache(maxsize=None)
def _planned(cls: type) -> type:
    # Under the same name: Mesh-TF counts operations by the names of their classes.
    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, (Planned, cls), members)


def adopt(operation: mtf.Operation) -> bool:
    """Makes an operation ask its graph's plan; returns whether it did not before."""
    if isinstance(operation, Planned):
        return False
    operation.__class__ = _planned(operation.__class__)
    return True


def flat(operations: list[Any]) -> Iterator[mtf.Operation]:
    """Operations in the order in which they are lowered, those of a loop before the loop."""
    for operation in operations:
        if isinstance(operation, mtf.WhileLoopOperation):
            yield from flat(loop_condition(operation).operations)
            yield from flat(loop_body(operation).operations)
        yield operation
