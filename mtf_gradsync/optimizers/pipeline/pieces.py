"""Pieces of variables, for stages that reduce a variable's values in several steps."""

from __future__ import annotations

import dataclasses
import functools
from typing import Sequence, Union

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.stage import StageOperation, reduced_values


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A range of the numbers in each core's slice of a variable.

    It can be the owner of a gradient in a `GradientSet`. The errors that a strategy keeps for it
    are a piece of those of the variable.

    Attributes:
      variable: the variable.
      number: the number of the piece, part of names of state.
      start: the position of its first number in a slice, in row-major order.
      stop: the position after its last number.
      slice_shape: the shape of a core's slice of the variable.
      errors: state variables of the whole variable by name, which its pieces share.
    """

    variable: mtf.Variable
    number: int
    start: int
    stop: int
    slice_shape: Sequence[int]
    errors: dict[str, mtf.Variable]

    @property
    def shape(self) -> mtf.Shape:
        """The shape as a mesh tensor: dims that the layout splits, then the numbers of a slice."""
        dims = zip(self.variable.shape.dims, self.slice_shape)
        split = [mtf.Dimension(d.name, d.size // n) for d, n in dims]
        size, columns = self.stop - self.start, self.slice_shape[-1] if self.slice_shape else 1
        own = [mtf.Dimension("_rows", size)]
        if columns > 1 and not self.start % columns and not size % columns:
            # Whole rows stay a matrix, for strategies that factor it.
            own = [mtf.Dimension("_rows", size // columns), mtf.Dimension("_columns", columns)]
        return mtf.Shape([*(d for d in split if d.size > 1), *own])

    def cut_out(self, x: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """Returns the piece of a core's slice, in a shape."""
        return tf.reshape(tf.reshape(x, [-1])[self.start : self.stop], shape)

    def put_back(self, x: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        """Returns a core's slice with a new value of the piece."""
        flat = tf.reshape(x, [-1])
        new = tf.cast(tf.reshape(value, [-1]), x.dtype)
        return tf.reshape(tf.concat([flat[: self.start], new, flat[self.stop :]], 0), x.shape)

    @property
    def name(self) -> str:
        """The variable's name."""
        return str(self.variable.name)

    @property
    def graph(self) -> mtf.Graph:
        """The variable's graph."""
        return self.variable.graph


#: A variable, or a piece of one.
Owner = Union[mtf.Variable, Piece]


def variable_of(owner: Owner) -> mtf.Variable:
    """Returns the variable of an owner of a gradient."""
    return owner.variable if isinstance(owner, Piece) else owner


class PieceOfState:
    """The piece of a state variable that belongs to a piece of a variable.

    The state variable has the shape `[shard dims...] + variable dims`, and `value` the shape
    `[shard dims...] + piece dims`.
    """

    def __init__(self, variable: mtf.Variable, piece: Piece, shard_dims: Sequence[mtf.Dimension]):
        self.variable, self._piece = variable, piece
        (self.value,) = CutOut([variable.value], [piece], shard_dims).outputs
        self.shape, self.activation_dtype = self.value.shape, variable.activation_dtype

    def put_back(self, value: mtf.Tensor) -> mtf.Tensor:
        """Returns the state variable's value with a new value of the piece."""
        return PutBack([self.variable.value], [value], [self._piece]).outputs[0]


class CutOut(StageOperation):
    """Cuts pieces out of tensors, `[shard dims...] + variable dims`, without communication.

    The mesh splits the shard dims to size 1.
    """

    def __init__(
        self,
        tensors: Sequence[mtf.Tensor],
        pieces: Sequence[Piece],
        shard_dims: Sequence[mtf.Dimension] = (),
    ):
        self._pieces = list(pieces)
        shapes = [mtf.Shape([*shard_dims, *piece.shape.dims]) for piece in pieces]
        super().__init__(tensors, shapes, "cut_out")

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        results = []
        for x, piece, output in zip(
            reduced_values(lowering, self.inputs), self._pieces, self.outputs
        ):
            shape = mesh_impl.slice_shape(output.shape)
            results.append(mesh_impl.slicewise(functools.partial(piece.cut_out, shape=shape), x))
        self.set_outputs(lowering, results)


class PutBack(StageOperation):
    """Replaces pieces of tensors by values as `CutOut` gives them, without communication."""

    def __init__(
        self,
        tensors: Sequence[mtf.Tensor],
        values: Sequence[mtf.Tensor],
        pieces: Sequence[Piece],
    ):
        self._pieces = list(pieces)
        super().__init__([*tensors, *values], [x.shape for x in tensors], "put_back")

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        slicewise, count = lowering.mesh_impl(self).slicewise, len(self._pieces)
        values = reduced_values(lowering, self.inputs)
        given = zip(self._pieces, values[:count], values[count:])
        self.set_outputs(lowering, [slicewise(piece.put_back, x, new) for piece, x, new in given])
