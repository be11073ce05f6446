"""Variables as matrices: which of their dimensions a model uses as inputs and as outputs."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import loop_body
from mtf_gradsync._private.patches import late_configurable


class Matrix(NamedTuple):
    """A variable as a matrix, or as several matrices, by positions of its dimensions.

    Attributes:
      inputs: the dimensions over which a product of activations and the matrix sums.
      outputs: the dimensions that the product has in place of the inputs.
      copies: the dimensions that number several matrices, such as experts.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    copies: tuple[int, ...] = ()


def matrix_of(variable: mtf.Variable) -> Matrix:
    """Returns which dimensions of a variable are inputs and outputs in the model's first product.

    If the graph has no product of activations and the variable, the first dimension is taken as the
    input, and the others together as the outputs, as in Mesh-TF's dense layers.
    """
    found = _Uses.of(variable.graph).matrices.get(variable.name)
    return found or Matrix((0,), tuple(range(1, variable.shape.ndims)))


@late_configurable(module="mtf_gradsync")
def is_hidden_matrix(variable: mtf.Variable) -> bool:
    """Returns whether a variable is a matrix of a hidden layer, for groups of `ByVariable`.

    Such a matrix is a variable of two or more dimensions that the model multiplies by activations.
    Not among them are tables in which the model looks rows up (embeddings), variables with the
    looked-up dimension of such a table (as the last layer has that of the vocabulary), and
    variables with "embedding", "softmax" or "logits" in their names. If no operation of the graph
    uses a variable yet, the name and the number of dimensions decide.

    Examples:
      >>> mesh, size = mtf.Mesh(mtf.Graph(), "mesh"), mtf.Dimension("size", 2)
      >>> heads, ones = mtf.Dimension("heads", 2), tf.ones_initializer()
      >>> gs.is_hidden_matrix(mtf.get_variable(mesh, "layer/q", [size, heads], initializer=ones))
      True
      >>> gs.is_hidden_matrix(mtf.get_variable(mesh, "bias", [size], initializer=ones))
      False
    """
    name, uses = variable.name, _Uses.of(variable.graph)
    if variable.shape.ndims < 2 or any(x in name.lower() for x in _NOT_HIDDEN):
        return False
    if name not in uses.used:
        return True
    return name in uses.matrices and not uses.looked_up.intersection(variable.shape.dims)


_NOT_HIDDEN = ("embedding", "softmax", "logits")


class _Uses:
    """The first product of each variable in a graph.

    Attributes:
      used: the names of variables that are an input of an operation.
      matrices: each variable as a matrix, by the variable's name.
      looked_up: dimensions along which the model looks rows up, such as that of the vocabulary.
    """

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.matrices: dict[str, Matrix] = {}
        self.looked_up: set[mtf.Dimension] = set()
        self._number = 0
        # Tensors that are variables, perhaps cast, scaled, or with other names of dimensions, which
        # are in the variable's order.
        self._same: weakref.WeakKeyDictionary[mtf.Tensor, tuple[str, list[mtf.Dimension]]] = (
            weakref.WeakKeyDictionary()
        )

    @classmethod
    def of(cls, graph: mtf.Graph) -> _Uses:
        """Returns the uses in a graph, as far as it is built."""
        uses = _of_graphs.setdefault(graph, cls())
        operations = graph.operations
        if len(operations) < uses._number:
            uses._number = 0  # an error has taken some out again
        for operation in operations[uses._number :]:
            uses._note(operation)
        uses._number = len(operations)
        return uses

    def _note(self, operation: mtf.Operation) -> None:
        if isinstance(operation, mtf.WhileLoopOperation):
            for inner in loop_body(operation).operations:
                self._note(inner)
            return
        if isinstance(operation, mtf.Variable):
            self._same[operation.value] = operation.name, operation.shape.dims
            return
        for x in operation.inputs:
            if x not in self._same:
                continue
            (name, dims), (out, *more) = self._same[x], operation.outputs or [None]
            others = [y for y in operation.inputs if y is not x]
            self.used.add(name)
            if out is None or more:
                continue
            if isinstance(operation, mtf.EinsumOperation) and others:
                self._note_product(name, dims, others, out.shape)
            elif not any(y.shape.dims for y in others):
                if sorted(out.shape.dims) == sorted(dims):
                    self._same[out] = name, dims
                elif [d.size for d in out.shape.dims] == [d.size for d in dims]:
                    self._same[out] = name, out.shape.dims

    def _note_product(
        self, name: str, dims: list[mtf.Dimension], others: list[mtf.Tensor], out: mtf.Shape
    ) -> None:
        if name in self.matrices:
            return
        of_others = {d for y in others for d in y.shape.dims}
        places = list(enumerate(dims))
        inputs = tuple(i for i, d in places if d in of_others and d not in out.dims)
        outputs = tuple(i for i, d in places if d not in of_others)
        copies = tuple(i for i, d in places if d in of_others and d in out.dims)
        if any(isinstance(y.operation, mtf.ops.OneHotOperation) for y in others):
            self.looked_up.update(dims[i] for i in inputs)
        elif inputs and outputs:
            self.matrices[name] = Matrix(inputs, outputs, copies)


_of_graphs: weakref.WeakKeyDictionary[mtf.Graph, _Uses] = weakref.WeakKeyDictionary()
