"""How the operations of a step let its plan lower them, and the state of one lowering."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, ContextManager, Iterator, Mapping, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import loop_body, loop_condition, sum_made_by


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


class PartLowering:
    """A part's work in one lowering; the base class does nothing."""

    # For operations that wait for others: functions that return the tf operations to wait for.
    waits: Mapping[mtf.Operation, Callable[[mtf.Lowering], Sequence[tf.Operation]]] = {}

    def lower(self, operation: mtf.Operation) -> bool:
        """Lowers an operation, also of a loop, or returns False: the operation lowers itself."""
        del operation
        return False

    def lower_variable(self, variable: mtf.Variable) -> bool:
        """Lowers a variable, or returns False: the variable lowers itself."""
        del variable
        return False

    def inside_branch(self) -> ContextManager[None]:
        """Surrounds the lowering of a branch, none of whose tensors may be used outside."""
        return contextlib.nullcontext()

    def end(self) -> None:
        """Called when all operations are lowered."""


class PlanPart:
    """A part of a plan, which can lower operations.

    Subclasses replace their attributes and do not change the values, so that a plan can undo
    changes after an error by a shallow copy.

    Attributes:
      orders_updates: whether it makes the program's own assignments wait for reads.
    """

    orders_updates = False

    def begin(self, lowering: mtf.Lowering) -> PartLowering:
        """Begins a lowering; called when the graph has all of its operations."""
        raise NotImplementedError


class Lowered:
    """The state of one lowering."""

    def __init__(self, scope: str):
        self.scope = scope  # the name scope that operations are lowered in
        self.branch: Any = None  # the one that is being lowered
        self.parts: list[PartLowering] = []
        self.early: set[mtf.Operation] = set()  # those lowered before their turn
        self.reads: dict[mtf.Mesh, list[mtf.Tensor]] = {}  # variables' values that are read once
        self.barriers: dict[Any, tf.Operation] = {}  # gate -> what waits for its tensors

    @contextlib.contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Opens the name scope that Mesh-TF would open for an operation of a name."""
        with tf.name_scope(self.scope + "/" if self.scope else None):
            with tf.name_scope(name):
                yield


@contextlib.contextmanager
def pending_sums_outside(lowering: mtf.Lowering) -> Iterator[None]:
    """Forgets sums that Mesh-TF reduces inside the block, which have no value outside a branch."""
    before = {
        tensor: lazy
        for tensor, lazy in lowering.tensors.items()
        if type(lazy) is mtf.LazyAllreduceSum and sum_made_by(lazy) is None
    }
    for tensor, lazy in before.items():
        lowering.tensors[tensor] = mtf.LazyAllreduceSum(
            lazy.mesh_impl, lazy.laid_out_input, lazy.mesh_axes, lazy.add_counter_fn
        )
    try:
        yield
    finally:
        lowering.tensors.update(before)


def scope_around(operation: mtf.Operation) -> str:
    """Returns the name scope around the one that Mesh-TF opened for an operation."""
    inner = tf.get_default_graph().get_name_scope().split("/")
    # A name with slashes opens nested scopes, of which the last may have a number added.
    return "/".join(inner[: -(operation.name.count("/") + 1)])
