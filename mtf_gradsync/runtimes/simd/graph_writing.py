"""Writes graphs: nodes, constants, handles of variables, and copies of nodes of another graph."""

from __future__ import annotations

from typing import Any, Iterable

from mtf_gradsync.extension import tf
from mtf_gradsync.runtimes.simd.graph_facts import CONTROL

_PREFIXES = ("_tpu", "_xla", "_Xla")


def join_input(name: str, number: int) -> str:
    """Returns the text of a ``NodeDef``'s input, as in ``"name:2"``; the inverse of `split_input`.

    The input is output `number` of the node `name`; the number `CONTROL` makes a control input.
    """
    if number == CONTROL:
        return "^" + name
    return name if number == 0 else f"{name}:{number}"


def remove_device_attributes(node: tf.NodeDef) -> None:
    """Removes from a node the attributes that tie it to devices or to a TPU."""
    node.device = ""
    for attr in list(node.attr):
        if attr == "_class" or attr.startswith(_PREFIXES):
            del node.attr[attr]


class GraphWriter:
    """A graph that is written node by node. It has the functions that another graph has.

    The attribute `graph_def` is the graph as far as it has been written.
    """

    def __init__(self, source: tf.GraphDef):
        """Begins a graph without nodes, with the functions and the version of `source`."""
        self.graph_def = tf.GraphDef(library=source.library, versions=source.versions)

    def add(self, name: str, op: str, inputs: Iterable[str] = (), **types: Any) -> tf.NodeDef:
        """Adds a node of the type `op`, and returns it.

        `inputs` are texts, as in a ``NodeDef``. Data inputs stay in their order; after them comes
        each control input once. `types` are the attributes of the node whose values are dtypes.
        """
        node = self.graph_def.node.add(name=name, op=op)
        _set_inputs(node, inputs)
        for attr, dtype in types.items():
            node.attr[attr].type = tf.as_dtype(dtype).as_datatype_enum
        return node

    def add_constant(self, name: str, value: Any, dtype: tf.DType, near: str) -> str:
        """Adds a constant in the same loop and branch as the node `near`; returns `name`."""
        node = self.add(name, "Const", ["^" + near], dtype=dtype)
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
        return name

    def add_handle(
        self, name: str, variable: str, dtype: tf.DType, size: int, near: str = ""
    ) -> str:
        """Adds a node with the handle of a variable that is a vector; returns `name`.

        `variable` is the name that all handles of the variable share, and `size` is the number of
        its elements. If `near` is given, the node is in the same loop and branch as `near`.
        """
        node = self.add(name, "VarHandleOp", ["^" + near] if near else [], dtype=dtype)
        node.attr["shape"].shape.dim.add().size = size
        node.attr["shared_name"].s = variable.encode()
        return name

    def add_placeholder(self, name: str, dtype: tf.DType, shape: Any = None) -> None:
        """Adds a placeholder; `shape`, if it is not None, is the shape of its value."""
        node = self.add(name, "Placeholder", dtype=dtype)
        if shape is not None:
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())

    def copy(self, node: tf.NodeDef, inputs: Iterable[str], name: str = "") -> tf.NodeDef:
        """Adds a copy of `node` that is tied to no device, with other inputs, and returns it.

        `inputs` are as in `add`. If `name` is "", the copy has the name of `node`.
        """
        copy = self.graph_def.node.add()
        copy.CopyFrom(node)
        copy.name = name or node.name
        remove_device_attributes(copy)
        _set_inputs(copy, inputs)
        return copy


def finalized_graph(graph_def: tf.GraphDef) -> tf.Graph:
    """Returns the graph that `graph_def` describes, to which nothing can be added."""
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(graph_def, name="")
    graph.finalize()
    return graph


def _set_inputs(node: tf.NodeDef, inputs: Iterable[str]) -> None:
    given = list(inputs)
    control = sorted({text for text in given if text.startswith("^")})
    node.input[:] = [*(text for text in given if not text.startswith("^")), *control]
