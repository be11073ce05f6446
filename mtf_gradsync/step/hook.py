"""The hook into the lowering: operations that let their graph's plan lower them."""

from __future__ import annotations

import functools
from typing import Any, Iterator

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import loop_body, loop_condition


class Planned:
    """A mixin for the class of every operation of a graph, which lets the plan lower it.

    Operations stay the same objects for Mesh-TF's rewriting (autostack, combined assignments) and
    for the program. Copies, as by `mtf.recompute_grad`, are lowered by the plan too.
    """

    graph: mtf.Graph

    def lower(self, lowering: mtf.Lowering) -> None:
        """Lets the plan lower the operation."""
        vars(self.graph)[PLAN].lower(self, lowering)

    def lower_itself(self, lowering: mtf.Lowering) -> None:
        """Lowers the operation as it would be lowered without a plan."""
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
    """Lets the plan of its graph lower an operation; returns False if it did already."""
    if isinstance(operation, Planned):
        return False
    operation.__class__ = _planned(operation.__class__)
    return True


def flat(operations: list[Any]) -> Iterator[mtf.Operation]:
    """Gives operations in the order in which they are lowered, those of a loop before the loop."""
    for operation in operations:
        if isinstance(operation, mtf.WhileLoopOperation):
            yield from flat(loop_condition(operation).operations)
            yield from flat(loop_body(operation).operations)
        yield operation
