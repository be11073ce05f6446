"""The interface of a plan's parts, which lower operations in their own way."""

from __future__ import annotations

import contextlib
from typing import Callable, ContextManager, Mapping, Sequence

from mtf_gradsync._private.libraries import mtf, tf


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


class Part:
    """A part of a plan, which can lower operations.

    Subclasses replace their attributes and do not change the values, so that a plan can undo
    changes after an error by a shallow copy.
    """

    def begin(self, lowering: mtf.Lowering) -> PartLowering:
        """Begins a lowering; called when the graph has all of its operations."""
        raise NotImplementedError
