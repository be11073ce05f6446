"""MuonOptimizer: momentum made orthogonal, for variables that the model uses as matrices."""

from __future__ import annotations

import math
import weakref
from typing import Any, Callable, NamedTuple, Sequence

from mtf_gradsync._common import check_flag, check_number, check_whole_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import loop_body, meshes_made
from mtf_gradsync._private.patches import late_configurable
from mtf_gradsync.gradients.arguments import check_rate, rate_of_step
from mtf_gradsync.gradients.rounding import COUNT, NEAREST, make_update_count, rounds_by_chance
from mtf_gradsync.optimizers.adamw import InnerOptimizer, wide_dtype

# The coefficients of the quintic iteration: its slope at 0 is as steep as it can be, and singular
# values end between about 0.7 and 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
# In names of variables that are no matrices of hidden layers.
_NOT_HIDDEN = ("embedding", "softmax", "logits")


@late_configurable(module="mtf_gradsync")
class MuonOptimizer(InnerOptimizer):
    """Momentum whose matrices are made nearly orthogonal, by Newton-Schulz steps.

    The update of a matrix with a gradient g computes:

        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g      (nesterov; else u = m)
        x = u / |u|; `steps` times: s = x x^T; x = 3.4445 x + (-4.775 s + 2.0315 s s) x
        size = sqrt(max(1, outputs / inputs))
        variable -= learning_rate * (size * x + weight_decay_rate * variable)

    Every variable of two or more dimensions is taken as a matrix. Which dimensions are inputs and
    which are outputs follows from the model's first product with the variable (of the filter of a
    convolution, the last dimension is the output). Other dimensions number several matrices
    (experts), each of which is made orthogonal by itself. Vectors, scalars, embeddings and the last
    layer need another optimizer: `ByVariable` gives groups of variables different optimizers.
    Arithmetic is in float32 at least. A matrix that the mesh splits is gathered once for all
    Newton-Schulz steps. Not gathered is a matrix of which the mesh splits only the longer side, if
    the products x x^T of all steps together have fewer bytes than the matrix.

    The slot of a variable is `<variable>/muon_m`, the mean m, laid out like the variable and at
    least float32 (or as `slot_dtype` says). With rounding="stochastic", if the variable or its slot
    is rounded, there is also `<variable>/rounding_t`, the int32 number of updates of the variable.

    Examples:
      >>> hidden = gs.is_hidden_matrix, gs.MuonOptimizer(0.02)
      >>> opt = gs.ByVariable(gs.AdamWOptimizer(0.001), [hidden])
      >>> print(gs.describe(gs.CrossShardOptimizer(opt)))
      every step  reduce over the replica axes: fused  (CrossShardOptimizer)
                  update by Muon: is_hidden_matrix
                  update by AdamW: the others

    References:
      Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, and its
      reference implementation, whose matrices are outputs by inputs.
    """

    def __init__(
        self,
        learning_rate: Any,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        weight_decay_rate: float = 0.0,
        rounding: str = NEAREST,
        slot_dtype: tf.DType | None = None,
    ):
        """Sets the learning rate, the momentum, the steps and the weight decay.

        Args:
          learning_rate: a number of 0 or more, or a scalar tf or mtf tensor or variable, which is
            checked in each step. An update of a square matrix has a spectral norm of about 1 times
            the rate: 0.02 is usual, where AdamW takes 0.001.
          momentum: decay of the mean of gradients, from 0 up to 1 (not included).
          nesterov: whether an update adds the gradient to the mean once more, as in the formula of
            `MuonOptimizer`.
          steps: the number of Newton-Schulz steps, 1 or more.
          weight_decay_rate: the weight decay, 0 or more: in an update a variable loses this part
            of its value, times the learning rate.
          rounding: how new values of variables and slots in bfloat16 are rounded: to "nearest", or
            "stochastic". Stochastic rounding goes up or down by chance and does not change the
            mean, so that small changes are not lost.
          slot_dtype: dtype of the slots. None takes float32, or the variable's dtype if that is
            wider; tf.bfloat16 needs rounding="stochastic".

        Raises:
          TypeError: learning_rate is no number and no scalar tensor.
          ValueError: an argument is out of range.
        """
        self.learning_rate = check_rate(learning_rate)
        beta = "a number from 0 up to 1 (not included)"
        self.momentum = check_number("momentum", momentum, beta, below=1.0)
        self.nesterov = check_flag("nesterov", nesterov)
        self.steps = check_whole_number("steps", steps)
        self.weight_decay_rate = check_number(
            "weight_decay_rate", weight_decay_rate, "a number from 0"
        )
        self._set_rounding(rounding, slot_dtype)

    def check_variable(self, var: mtf.Variable) -> None:
        super().check_variable(var)
        if var.shape.ndims < 2:
            raise ValueError(
                f"MuonOptimizer updates matrices, and {var.name!r} of shape {var.shape.to_string} "
                "is none: update it by another optimizer, as in "
                "gs.ByVariable(gs.AdamWOptimizer(0.001), [(gs.is_hidden_matrix, "
                "gs.MuonOptimizer(0.02))])."
            )

    def _update(self, grad: mtf.Tensor, var: mtf.Variable) -> list[mtf.Operation]:
        wide = wide_dtype(var)
        m = self._make_slot(var, "muon_m")
        # 1. Momentum.
        grad = mtf.cast(grad, wide) * (1.0 - self.momentum)
        new_m = mtf.cast(m.value, wide) * self.momentum + grad
        update = new_m * self.momentum + grad if self.nesterov else new_m
        # 2. Orthogonal, and as large as for a square matrix.
        matrix = matrix_of(var)
        update = orthogonal(update, self.steps, matrix)
        inputs, outputs = (mtf.Shape([var.shape[i] for i in side]).size for side in matrix[:2])
        update *= math.sqrt(max(1.0, outputs / inputs))
        # 3. Decay, and the rate.
        if self.weight_decay_rate:
            update += mtf.cast(var.value, wide) * self.weight_decay_rate
        rate = rate_of_step(self.learning_rate, var.mesh, wide, type(self).__name__)
        draw, counting = None, []
        if rounds_by_chance(self.rounding, var, m):
            count = make_update_count(var.mesh, f"{var.name}/{COUNT}")
            draw, counting = count.value, [mtf.assign(count, count.value + 1)]
        return [*self._write(var, update * rate, {m: new_m}, draw), *counting]


def orthogonal(x: mtf.Tensor, steps: int, matrix: Matrix) -> mtf.Tensor:
    """Returns the nearly orthogonal matrix that Newton-Schulz steps make of a matrix.

    Args:
      x: a tensor of two or more dimensions.
      steps: the number of steps.
      matrix: which dimensions of x are the two sides of a matrix. The other dimensions number
        several matrices, each of which is made orthogonal by itself.

    Returns:
      A tensor of the same shape, whose matrices have singular values between about 0.7 and 1.2. A
      matrix of zeros stays zeros.
    """
    inputs, outputs, copies = ([x.shape[i] for i in places] for places in matrix)
    side, along = sorted((inputs, outputs), key=lambda dims: mtf.Shape(dims).size)
    shape = x.shape
    second, third = (_named(side, name) for name in ("second", "third"))
    if not _stays_split(side, along, steps):
        # By names that no layout splits.
        x = _renamed(x, [*side, *along], _named([*side, *along], "whole"))
        side = _named(side, "whole")
    # The sum first, as squares of small numbers are 0 in float32.
    each = mtf.Shape(copies)
    x = x / (mtf.reduce_sum(mtf.abs(x), output_shape=each) + 1e-30)
    x = x * mtf.rsqrt(mtf.reduce_sum(mtf.square(x), output_shape=each) + 1e-20)
    square = mtf.Shape([*copies, *side, *second])
    for _ in range(steps):
        across = _renamed(x, side, second)
        s = mtf.einsum([x, across], square)
        # An operation that needs the sum over the mesh. Without it, each use would add up its own.
        s = mtf.slicewise(tf.identity, [s], splittable_dims=square.dims)
        s_s = mtf.einsum([_renamed(s, second, third), _renamed(s, side, third)], square)
        x = x * _A + mtf.einsum([s * _B + s_s * _C, across], x.shape)
    return mtf.reshape(x, shape)


def _named(dims: Sequence[mtf.Dimension], name: str) -> list[mtf.Dimension]:
    return [mtf.Dimension(f"muon_{name}_{d.name}", d.size) for d in dims]


def _renamed(
    x: mtf.Tensor, dims: Sequence[mtf.Dimension], to: Sequence[mtf.Dimension]
) -> mtf.Tensor:
    """Returns `x` with the dimensions `dims` renamed to those of `to`, in the same order.

    `to` has a dimension of the same size for each of `dims`. Other dimensions keep their names.
    """
    names = dict(zip(dims, to))
    return mtf.reshape(x, mtf.Shape([names.get(d, d) for d in x.shape.dims]))


def _stays_split(
    shorter: Sequence[mtf.Dimension], longer: Sequence[mtf.Dimension], steps: int
) -> bool:
    """Returns whether a matrix stays as the mesh splits it during the Newton-Schulz steps.

    A matrix that does not stay split is gathered before the steps. The result is true if the mesh
    splits neither side of the matrix. It is also true if the mesh splits only the longer side, and
    leaving it split sends fewer numbers than a gather. A gather sends about twice the numbers of
    the matrix, once. (A SIMD mesh gathers by a sum of tensors that are padded with zeros, and a sum
    sends about twice the numbers of its result.) A matrix that stays split sends, in each of the
    Newton-Schulz steps, about twice the numbers of the product x x^T, a square whose side is the
    shorter side. If the mesh is not known, the result is false.

    `shorter` are the dimensions of the shorter side, `longer` are those of the longer side, and
    `steps` is the number of Newton-Schulz steps.
    """
    meshes = meshes_made()
    if len(meshes) != 1:
        return False
    ((mesh_shape, layout),) = meshes
    split = [
        any(layout.tensor_dimension_to_mesh_axis(d, mesh_shape) is not None for d in dims)
        for dims in (shorter, longer)
    ]
    square = mtf.Shape(shorter).size ** 2
    return split == [False, False] or (
        split == [False, True] and steps * square < mtf.Shape([*shorter, *longer]).size
    )


class Matrix(NamedTuple):
    """A way to take a variable as a matrix, or as several: the positions of its dimensions.

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

    The result has the positions of inputs and outputs in the variable's shape. If the graph has no
    product of activations and the variable, the dimensions are those of Mesh-TF's dense layers. The
    first dimension is then the input, and the other dimensions together are the outputs.
    """
    found = _VariableUses.of(variable.graph).matrices.get(variable.name)
    return found or Matrix((0,), tuple(range(1, variable.shape.ndims)))


@late_configurable(module="mtf_gradsync")
def is_hidden_matrix(variable: mtf.Variable) -> bool:
    """Returns whether a variable is a matrix of a hidden layer, for groups of `ByVariable`.

    A matrix of a hidden layer is a variable of two or more dimensions that the model multiplies by
    activations, such as the filter of a convolution. Three kinds of variables do not count as
    matrices of hidden layers. The first are tables in which the model looks rows up (embeddings).
    The second are variables that have the dimension of a table along which rows are looked up: the
    last layer, for example, has the dimension of the vocabulary. The third are variables with
    "embedding", "softmax" or "logits" in their names. If no operation of the graph uses a variable
    yet, its name and number of dimensions decide.

    Examples:
      >>> mesh, size = mtf.Mesh(mtf.Graph(), "mesh"), mtf.Dimension("size", 2)
      >>> heads, ones = mtf.Dimension("heads", 2), tf.ones_initializer()
      >>> gs.is_hidden_matrix(mtf.get_variable(mesh, "layer/q", [size, heads], initializer=ones))
      True
      >>> gs.is_hidden_matrix(mtf.get_variable(mesh, "bias", [size], initializer=ones))
      False
    """
    name, uses = variable.name, _VariableUses.of(variable.graph)
    if variable.shape.ndims < 2 or any(x in name.lower() for x in _NOT_HIDDEN):
        return False
    if name not in uses.used:
        return True
    return name in uses.matrices and not uses.looked_up.intersection(variable.shape.dims)


class _VariableUses:
    """A record of how the operations of a graph use its variables.

    Attributes:
      used: the names of variables that some operation has as an input.
      matrices: for each variable that is multiplied by activations, by name: which of its
        dimensions are inputs and outputs in the first such product.
      looked_up: dimensions along which the model looks rows up, such as the vocabulary.
    """

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.matrices: dict[str, Matrix] = {}
        self.looked_up: set[mtf.Dimension] = set()
        # How many operations are noted, and the last of them.
        self._number = 0
        self._last: Callable[[], mtf.Operation | None] = lambda: None
        # Tensors that are variables, perhaps cast, scaled, masked (by another variable, too), or
        # with other names of dimensions: these, by the variable's name, in the variable's order.
        self._same: weakref.WeakKeyDictionary[mtf.Tensor, dict[str, list[mtf.Dimension]]] = (
            weakref.WeakKeyDictionary()
        )

    @classmethod
    def of(cls, graph: mtf.Graph) -> _VariableUses:
        """Returns the graph's record, which includes all operations that the graph has now."""
        operations, uses = graph.operations, _uses_by_graph.get(graph)
        number = uses._number if uses else 0
        if uses is None or operations[number - 1 : number] != [uses._last()]:
            # There is no record, or an error has taken operations out again.
            uses = _uses_by_graph[graph] = cls()
        for operation in operations[uses._number :]:
            uses._note(operation)
        uses._number = len(operations)
        if operations:
            uses._last = weakref.ref(operations[-1])
        return uses

    def _note(self, operation: mtf.Operation) -> None:
        if isinstance(operation, mtf.WhileLoopOperation):
            for inner in loop_body(operation).operations:
                self._note(inner)
            return
        if isinstance(operation, mtf.Variable):
            self._same[operation.value] = {operation.name: operation.shape.dims}
            return
        out, *more = operation.outputs or [None]
        known = [(x, *one) for x in operation.inputs for one in self._same.get(x, {}).items()]
        for x, name, dims in known:
            others = [y for y in operation.inputs if y is not x]
            self.used.add(name)
            if out is None or more:
                continue
            if isinstance(operation, (mtf.Conv2dOperation, mtf.Conv3dOperation)):
                if x is operation.inputs[1]:
                    output = dims.index(x.shape.dims[-1])
                    inputs = tuple(i for i in range(len(dims)) if i != output)
                    self.matrices.setdefault(name, Matrix(inputs, (output,)))
                continue
            is_alone = not any(y.shape.dims for y in others)
            is_product = isinstance(operation, mtf.EinsumOperation) and bool(others)
            if sorted(out.shape.dims) == sorted(dims):
                # A product is one with a mask, or with a factor for each row or column.
                if is_product or is_alone:
                    self._same.setdefault(out, {})[name] = dims
            elif is_product:
                self._note_product(name, dims, others, out.shape)
            elif [d.size for d in out.shape.dims] == [d.size for d in dims] and is_alone:
                self._same.setdefault(out, {})[name] = out.shape.dims

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


_uses_by_graph: weakref.WeakKeyDictionary[mtf.Graph, _VariableUses] = weakref.WeakKeyDictionary()
