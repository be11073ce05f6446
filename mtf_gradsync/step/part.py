"""What else takes part in a step: something that lowers operations in a way of its own."""

from __future__ import annotations

import contextlib
from typing import Callable, ContextManager, Mapping, Sequence

from mtf_gradsync._private.libraries import mtf, tf


class PartLowering:
    """What a part does in one lowering. The base class does nothing.

    Attributes:
      waits: operations of the graph that wait in this lowering, and what gives the tf operations
        that each waits for.
    """

    waits: Mapping[mtf.Operation, Callable[[mtf.Lowering], Sequence[tf.Operation]]] = {}

    def lower(self, operation: mtf.Operation) -> bool:
        """Lowers an operation, by its `lower_itself` or otherwise.

        Args:
          operation: an operation of the graph, or of a loop in it.

        Returns:
          Whether it did; if not, the operation lowers itself.
        """
        del operation
        return False

    def lower_variable(self, variable: mtf.Variable) -> bool:
        """Lowers a variable in another way than its own.

        Args:
          variable: a variable of the graph.

        Returns:
          Whether it did; if not, the variable lowers itself.
        """
        del variable
        return False

    def inside_branch(self) -> ContextManager[None]:
        """Entered around the lowering of a branch, of which nothing may be used outside."""
        return contextlib.nullcontext()


class Part:
    """Something that a plan asks when a graph is lowered.

    It keeps what wrappers want of it in attributes that are replaced rather than changed, so that
    a shallow copy is enough for a plan to go back to what was wanted before an error.
    """

    def begin(self, lowering: mtf.Lowering) -> PartLowering:
        """Called at the beginning of each lowering, when the graph has all of its operations."""
        raise NotImplementedError
