"""Pieces of variables, for stages that reduce a variable's values in several steps."""

from __future__ import annotations

from typing import Any, Sequence, Union

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.stage import StageOperation, reduced_values


class Piece:
    """A range of the numbers in each core's slice of a variable.

    It can be the owner of a gradient in a `GradientSet`. A strategy's errors for it are a piece of
    the variable's.

    Attributes:
      variable: the variable.
      number: the number of the piece, part of names of state.
      start: the position of its first number in a slice, in row-major order.
      stop: the position after its last number.
      shape: its shape as a mesh tensor: a dimension for each one of the variable that the layout
        splits, then the numbers of a slice.
      errors: state variables of the whole variable by name, which its pieces share.
    """

    def __init__(
        self,
        variable: mtf.Variable,
        number: int,
        start: int,
        stop: int,
        slice_shape: Sequence[int],
        errors: dict[str, mtf.Variable],
    ):
        """Describes a piece.

        Args:
          variable: the variable.
          number: the number of the piece.
          start: the position of its first number.
          stop: the position after its last number.
          slice_shape: the shape of a core's slice of the variable.
          errors: the same dictionary for all pieces of a variable.
        """
        self.variable, self.number, self.start, self.stop = variable, number, start, stop
        self.errors = errors
        dims = variable.shape.dims
        split = [mtf.Dimension(d.name, d.size // n) for d, n in zip(dims, slice_shape)]
        size, columns = stop - start, slice_shape[-1] if slice_shape else 1
        own = [mtf.Dimension("_rows", size)]
        if columns > 1 and not start % columns and not size % columns:
            # Whole rows stay a matrix, for strategies that factor it.
            own = [mtf.Dimension("_rows", size // columns), mtf.Dimension("_columns", columns)]
        self.shape = mtf.Shape([*(d for d in split if d.size > 1), *own])

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

    Attributes:
      variable: the state variable, `[shard dims...] + variable dims`.
      value: the piece's value, `[shard dims...] + piece dims`.
      shape: the shape of value.
      activation_dtype: the dtype of value.
    """

    def __init__(self, variable: mtf.Variable, piece: Piece, shard_dims: Sequence[mtf.Dimension]):
        self.variable, self._piece = variable, piece
        (self.value,) = CutOut([variable.value], [piece], shard_dims).outputs
        self.shape, self.activation_dtype = self.value.shape, variable.activation_dtype

    def put_back(self, value: mtf.Tensor) -> mtf.Tensor:
        """Returns the state variable's value with a new value of the piece."""
        return PutBack([self.variable.value], [value], [self._piece]).outputs[0]


class CutOut(StageOperation):
    """Cuts pieces out of tensors of their variables' shapes, without communication."""

    def __init__(
        self,
        tensors: Sequence[mtf.Tensor],
        pieces: Sequence[Piece],
        shard_dims: Sequence[mtf.Dimension] = (),
    ):
        """Adds the operation.

        Args:
          tensors: for each piece a tensor, `[shard dims...] + variable dims`.
          pieces: the pieces.
          shard_dims: dimensions that the mesh splits to size 1.
        """
        self._pieces = list(pieces)
        shapes = [mtf.Shape([*shard_dims, *piece.shape.dims]) for piece in pieces]
        super().__init__(tensors, shapes, "cut_out")

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)

        def cut(x: tf.Tensor, piece: Piece, shape: list[int]) -> tf.Tensor:
            return tf.reshape(tf.reshape(x, [-1])[piece.start : piece.stop], shape)

        values = reduced_values(lowering, self.inputs)
        shapes = [mesh_impl.slice_shape(output.shape) for output in self.outputs]
        given = zip(values, self._pieces, shapes)
        self.set_outputs(
            lowering,
            [mesh_impl.slicewise(lambda x, p=p, to=to: cut(x, p, to), x) for x, p, to in given],
        )


class PutBack(StageOperation):
    """Replaces pieces of tensors, without communication."""

    def __init__(
        self,
        tensors: Sequence[mtf.Tensor],
        values: Sequence[mtf.Tensor],
        pieces: Sequence[Piece],
    ):
        """Adds the operation.

        Args:
          tensors: for each piece a tensor, as for `CutOut`.
          values: the pieces' new values, as `CutOut` gives them.
          pieces: the pieces.
        """
        self._pieces = list(pieces)
        super().__init__([*tensors, *values], [x.shape for x in tensors], "put_back")

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)

        def put(x: tf.Tensor, value: tf.Tensor, piece: Piece) -> tf.Tensor:
            flat = tf.reshape(x, [-1])
            new = tf.cast(tf.reshape(value, [-1]), x.dtype)
            return tf.reshape(tf.concat([flat[: piece.start], new, flat[piece.stop :]], 0), x.shape)

        values: list[Any] = reduced_values(lowering, self.inputs)
        count = len(self._pieces)
        given = zip(values[:count], values[count:], self._pieces)
        self.set_outputs(
            lowering,
            [mesh_impl.slicewise(lambda x, y, p=p: put(x, y, p), x, y) for x, y, p in given],
        )
