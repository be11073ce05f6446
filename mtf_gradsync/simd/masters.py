"""Operations that initialize, copy, read and save the variables of a program's graph."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import SLICES_COLLECTION
from mtf_gradsync.optimizers.state.restoring import adapt_checkpoint
from mtf_gradsync.step import StepWatches


class MasterOps:
    """The names of operations that a session needs; the constructor adds them to the graph.

    Attributes:
      masters: name of each global variable -> the tensor that holds its value.
      saver_def: SaverDef of the global variables; None where there are none.
      watches: looks at the outcome of each step of the graph's programs.
    """

    def __init__(self, graph: tf.Graph, lowerings: Sequence[mtf.Lowering]):
        self.graph = graph
        with graph.as_default(), contextlib.ExitStack() as stack:
            # None: not inside whatever scope the caller happens to be in.
            stack.enter_context(tf.control_dependencies(None))
            stack.enter_context(tf.name_scope(None))
            slices = graph.get_collection(SLICES_COLLECTION)
            variables = tf.global_variables()
            self.initialize = [
                tf.variables_initializer(variables + tf.local_variables() + slices).name
            ]
            self.to_slices = [low.copy_masters_to_slices().name for low in lowerings]
            self.to_masters = [low.copy_slices_to_masters().name for low in lowerings]
            self.masters = {v.op.name: _value_name(graph, v) for v in variables}
            saver = tf.train.Saver(variables, max_to_keep=None) if variables else None
            self.saver_def = saver.as_saver_def() if saver else None
            self.watches = StepWatches(graph)

    def check_has_variables(self) -> None:
        """Raises ValueError if the graph has no variables to save or restore."""
        if self.saver_def is None:
            raise ValueError("The graph has no variables to save or restore.")

    def saver(self, graph: tf.Graph) -> tf.train.Saver:
        """Returns a saver for a graph that holds the operations, to which it adds nothing."""
        self.check_has_variables()
        with graph.as_default():
            return tf.train.Saver(saver_def=self.saver_def)

    def restore(self, session: tf.Session, path: str) -> None:
        """Reads a checkpoint into the masters, of this or of another mesh."""
        saver = self.saver(session.graph)
        with self.graph.as_default(), tempfile.TemporaryDirectory() as directory:
            saver.restore(session, adapt_checkpoint(path, directory))


def _value_name(graph: tf.Graph, variable: Any) -> str:
    return graph.as_graph_element(variable, allow_operation=False).name
