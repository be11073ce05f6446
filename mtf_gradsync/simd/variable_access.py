"""Reads and sets variables of a session by operations that the variables made themselves."""

from __future__ import annotations

import collections
from typing import Any, Iterable

from mtf_gradsync._private.libraries import tf


class VariableAccess:
    """Reads and sets the variables of a graph, by the name of their ``VarHandleOp``."""

    def __init__(self, graph: tf.Graph):
        """Finds the operations of a graph's variables, made by TensorFlow's own functions."""
        self.read: dict[str, str] = {}  # variable -> name of a tensor that holds its value
        self._exists: dict[str, str] = {}
        self._assign: dict[str, tuple[str, str]] = {}
        # A variable makes one read and one assignment of its own; later ones are the program's.
        for op in graph.get_operations():
            if op.type == "ReadVariableOp" and op.inputs[0].op.type == "VarHandleOp":
                self.read.setdefault(op.inputs[0].op.name, op.outputs[0].name)
            elif op.type == "VarIsInitializedOp":
                self._exists.setdefault(op.inputs[0].op.name, op.outputs[0].name)
            elif op.type == "AssignVariableOp" and op.inputs[0].op.type == "VarHandleOp":
                self._assign.setdefault(op.inputs[0].op.name, (op.name, op.inputs[1].name))

    def read_all(self, session: tf.Session) -> dict[str, Any]:
        """Returns values of all variables but those not initialized, which no step uses."""
        exists = session.run(self._exists)
        return session.run({n: x for n, x in self.read.items() if exists.get(n, True)})

    def set(self, session: tf.Session, values: Iterable[tuple[str, Any]]) -> None:
        """Sets variables, given as pairs of name and value.

        The session is on the graph, or on one that holds it under the same names.
        """
        # Variables may share the tensor that they are initialized with, so it takes several rounds.
        rounds: list[tuple[list[str], dict[str, Any]]] = []
        used: dict[str, int] = collections.Counter()
        for variable, value in values:
            operation, tensor = self._assign[variable]
            if used[tensor] == len(rounds):
                rounds.append(([], {}))
            operations, feed = rounds[used[tensor]]
            operations.append(operation)
            feed[tensor] = value
            used[tensor] += 1
        for operations, feed in rounds:
            session.run(operations, feed)
