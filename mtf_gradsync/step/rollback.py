"""An error leaves the mtf graph as it was."""

from __future__ import annotations

import contextlib
from typing import Iterator

from mtf_gradsync._private.libraries import mtf


@contextlib.contextmanager
def restored_on_error(graph: mtf.Graph) -> Iterator[None]:
    """Takes back what was added to an mtf graph when the block raises.

    TensorFlow's own graph cannot be taken back; what stands there without a mesh operation does
    nothing.
    """
    lists = (graph.operations, graph.all_variables, graph.trainable_variables)
    before = [list(items) for items in lists]
    names = dict(graph.name_to_variable)
    try:
        yield
    except BaseException:
        # Looked up again: Mesh-TF 0.1.21 replaces the list of operations when it combines
        # assignments.
        lists = (graph.operations, graph.all_variables, graph.trainable_variables)
        for items, old in zip(lists, before):
            items[:] = old
        graph.name_to_variable.clear()
        graph.name_to_variable.update(names)
        raise
