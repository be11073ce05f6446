"""Changes of Mesh-TensorFlow's functions, and what is called around its lowerings."""

from __future__ import annotations

import functools
from typing import Any, Callable

from mtf_gradsync._private.libraries import mtf, tf

# The attribute of a function for the names of the patches in it. Not `__wrapped__`, which every
# decorator may set. `functools.wraps` of a decorator around the function copies the attribute.
_PATCHES = "mtf_gradsync_patches"


def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replaces a function of a library by what `make` returns for it; a second call does nothing.

    Args:
      owner: the module or class that has the function.
      name: the function's name in it.
      make: makes the new function from the one that is there, which other libraries may have
        changed. Its own name identifies the patch.
    """
    there = getattr(owner, name)
    this, before = f"{make.__module__}.{make.__qualname__}", getattr(there, _PATCHES, ())
    if this in before:
        return
    made = functools.wraps(there)(make(there))
    setattr(made, _PATCHES, (*before, this))
    setattr(owner, name, made)


def call_around_lowering(
    before: Callable[[mtf.Graph], None], after: Callable[[mtf.Lowering, int], None]
) -> None:
    """Makes every lowering call a function before, as `Graph.rewrite_stack_variables`, and after.

    `before` gets the graph, and may add to it. `after` gets the lowering, and how many operations
    TensorFlow's graph had before it.
    """

    def call_and_lower(lower: Any) -> Any:
        def init(self: mtf.Lowering, graph: mtf.Graph, *args: Any, **kwargs: Any) -> None:
            before(graph)
            first = tf.get_default_graph().version
            lower(self, graph, *args, **kwargs)
            after(self, first)

        return init

    def call_and_rewrite(rewrite: Any) -> Any:
        def rewrite_stack_variables(self: mtf.Graph, *args: Any, **kwargs: Any) -> None:
            before(self)
            rewrite(self, *args, **kwargs)

        return rewrite_stack_variables

    patch(mtf.Lowering, "__init__", call_and_lower)
    patch(mtf.Graph, "rewrite_stack_variables", call_and_rewrite)


def keep_apart_when_combined(kind: type) -> None:
    """Makes `mtf.Graph.combine_assignments` pass operations of a kind on as they are."""

    def combine_others(combine: Any) -> Any:
        def combine_assignments(
            self: mtf.Graph, assignments: list[mtf.Operation]
        ) -> list[mtf.Operation]:
            apart = [op for op in assignments if isinstance(op, kind)]
            if not apart:
                return combine(self, assignments)
            return combine(self, [op for op in assignments if not isinstance(op, kind)]) + apart

        return combine_assignments

    patch(mtf.Graph, "combine_assignments", combine_others)
