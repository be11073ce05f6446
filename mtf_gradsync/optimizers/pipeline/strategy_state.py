"""Reduces gradients by strategies that keep state, such as compression errors.

The state is kept for whole variables. The gradients may be of whole variables or of pieces: ranges
of the numbers in each core's slice of a variable.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from typing import Any, Callable, Collection, Sequence, Union

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.layout import find_replica_axes
from mtf_gradsync.gradients.operations import GradientOperation, reduced_values
from mtf_gradsync.gradients.reduce_gradients import ReduceGradients
from mtf_gradsync.gradients.shards import pending_over_shards
from mtf_gradsync.mesh.axes import ReplicaAxes, axes_of_pipeline
from mtf_gradsync.optimizers.pipeline.forms import GradientSet, ReductionSettings
from mtf_gradsync.optimizers.slots import SlotBook, owner_of
from mtf_gradsync.optimizers.state import named_state
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.reduce.strategy import Compression, GradientOfCores, StateMaker


@dataclasses.dataclass(frozen=True, eq=False)
class VariablePiece:
    """A range of the numbers in each core's slice of a variable.

    In a `GradientSet` a piece can stand in place of a variable. A strategy may keep state in the
    shape of the variable (errors of compression). Then the state is kept for the whole variable,
    and each piece uses its range of the state.

    Attributes:
      variable: the variable.
      number: the number of the piece. Names of state variables that belong to this piece alone end
        with it.
      start: the position in a slice of the piece's first number, in row-major order.
      stop: the position after the piece's last number.
      slice_shape: the shape of a core's slice of the variable.
      errors: the state variables of the whole variable, by name. All pieces of the variable share
        this dictionary.
    """

    variable: mtf.Variable
    number: int
    start: int
    stop: int
    slice_shape: Sequence[int]
    errors: dict[str, mtf.Variable]

    @property
    def shape(self) -> mtf.Shape:
        """The piece's mtf shape: the variable's split dims, then the piece's numbers in a slice.

        The size of a split dim is the number of slices into which it is split. The numbers in a
        slice are one dim, or two (rows and columns) if the piece consists of whole rows of the
        slice.
        """
        dims = zip(self.variable.shape.dims, self.slice_shape)
        split = [mtf.Dimension(d.name, d.size // n) for d, n in dims]
        size, columns = self.stop - self.start, self.slice_shape[-1] if self.slice_shape else 1
        own = [mtf.Dimension("_rows", size)]
        if columns > 1 and not self.start % columns and not size % columns:
            # Whole rows stay a matrix, for strategies that factor it.
            own = [mtf.Dimension("_rows", size // columns), mtf.Dimension("_columns", columns)]
        return mtf.Shape([*(d for d in split if d.size > 1), *own])

    def cut_out(self, shape: Sequence[int], x: tf.Tensor) -> tf.Tensor:
        """Returns the piece's numbers out of x, a core's slice of the variable, as a tf tensor.

        The returned tensor has the shape `shape`, with as many numbers as the piece.
        """
        return tf.reshape(tf.reshape(x, [-1])[self.start : self.stop], shape)

    def put_back(self, shape: Sequence[int], x: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        """Returns a copy of x, a core's slice of the variable, with `value` as the piece's numbers.

        `shape` is the shape of x. `value` may have any shape with as many numbers as the piece, and
        is cast to the dtype of x.
        """
        flat = tf.reshape(x, [-1])
        new = tf.cast(tf.reshape(value, [-1]), x.dtype)
        return tf.reshape(tf.concat([flat[: self.start], new, flat[self.stop :]], 0), shape)

    @property
    def name(self) -> str:
        """The variable's name."""
        return str(self.variable.name)

    @property
    def graph(self) -> mtf.Graph:
        """The variable's graph."""
        return self.variable.graph


#: A variable, or a piece of one.
Owner = Union[mtf.Variable, VariablePiece]


def variable_of(owner: Owner) -> mtf.Variable:
    """Returns the variable of an owner, which is a variable or a piece of a variable."""
    return owner.variable if isinstance(owner, VariablePiece) else owner


class PieceOfState:
    """The range of a strategy's state variable that belongs to a piece of a variable.

    Attributes:
      variable: the state variable, of shape `[shard dims...] + variable dims`.
      value: the piece's range of the state variable's value, an mtf tensor of shape
        `[shard dims...] + piece dims`.
    """

    def __init__(
        self, variable: mtf.Variable, piece: VariablePiece, shard_dims: Sequence[mtf.Dimension]
    ):
        self.variable, self._piece = variable, piece
        (self.value,) = cut_out([variable.value], [piece], shard_dims)
        self.shape, self.activation_dtype = self.value.shape, variable.activation_dtype

    def put_back(self, value: mtf.Tensor) -> mtf.Tensor:
        """Returns the state variable's full value, in which `value` replaces the piece's range.

        `value` and the result are mtf tensors, of the shapes of the attributes `value` and
        `variable`.
        """
        return put_back([self.variable.value], [value], [self._piece])[0]


class _OfPieces(GradientOperation):
    """An operation on pieces of tensors; each core works on its own slices."""

    def __init__(
        self,
        work: Callable[..., tf.Tensor],
        pieces: Sequence[VariablePiece],
        shapes: Sequence[mtf.Shape],
        *tensors: Sequence[mtf.Tensor],
    ):
        """Adds the operation, which has an output for each piece.

        Args:
          work: the method of `VariablePiece` that makes a slice of the output.
          pieces: the pieces.
          shapes: the shapes of the outputs.
          *tensors: lists with a tensor for each piece. `work` gets the slices of these tensors.
        """
        self._work, self._pieces = work, list(pieces)
        super().__init__([x for some in tensors for x in some], shapes, work.__name__)

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl, count = lowering.mesh_impl(self), len(self._pieces)
        values, results = reduced_values(lowering, self.inputs), []
        for number, (piece, output) in enumerate(zip(self._pieces, self.outputs)):
            work = functools.partial(self._work, piece, mesh_impl.slice_shape(output.shape))
            results.append(mesh_impl.slicewise(work, *values[number::count]))
        self.set_outputs(lowering, results)


def cut_out(
    tensors: Sequence[mtf.Tensor],
    pieces: Sequence[VariablePiece],
    shard_dims: Sequence[mtf.Dimension] = (),
) -> Sequence[mtf.Tensor]:
    """Cuts one piece from each tensor; each core cuts it from its own slice.

    The tensors have the shape `[shard dims...] + variable dims`, and `pieces` has the piece to cut
    from each of them. The results have the shapes `[shard dims...] + piece dims`. The mesh splits
    the shard dims, if there are any, so that a slice has size 1 along them.
    """
    shapes = [mtf.Shape([*shard_dims, *piece.shape.dims]) for piece in pieces]
    return _OfPieces(VariablePiece.cut_out, pieces, shapes, tensors).outputs


def put_back(
    tensors: Sequence[mtf.Tensor], values: Sequence[mtf.Tensor], pieces: Sequence[VariablePiece]
) -> Sequence[mtf.Tensor]:
    """Returns `tensors`, each with an item of `values` in place of the item of `pieces`.

    The three lists have the same length. An item of `values` has the shape that `cut_out` gives the
    piece.
    """
    shapes = [x.shape for x in tensors]
    return _OfPieces(VariablePiece.put_back, pieces, shapes, tensors, values).outputs


_logger = logging.getLogger("mtf_gradsync")


class _Maker(StateMaker):
    """The object by which a strategy makes its state variables; it records which it has made.

    Attributes:
      made: what the strategy was given, in order: state variables, and a `PieceOfState` for each
        gradient of a piece of a variable.
      compression: the numbers of bytes before and after the compression, as the strategy reported
        them; None if it reported nothing.
    """

    def __init__(
        self, gradients: GradientSet, name: str, slots: SlotBook, if_taken: str, is_mean: bool
    ):
        self.name, self._if_taken, self._is_mean = name, if_taken, is_mean
        self._gradients, self._slots = gradients, slots
        self.made: list[mtf.Variable | PieceOfState] = []
        self.compression: Compression | None = None

    def variable(
        self,
        name: str,
        shape: mtf.Shape,
        dtype: tf.DType = tf.float32,
        shard_dims: Sequence[mtf.Dimension] = (),
        start: float = 0,
        begins_anew: bool = False,
    ) -> mtf.Variable:
        owners = {v.name: v for v in self._gradients.variables}
        owner = owners.get(owner_of(name, owners) or "")
        piece = owner if isinstance(owner, VariablePiece) else None
        note: dict[str, Any] = {"num_shard_dims": len(shard_dims), "is_mean": self._is_mean}
        if piece is not None and tuple(shape.dims) == tuple(piece.shape.dims) and shard_dims:
            # A piece of the variable's state, so that checkpoints do not depend on the pieces.
            if name not in piece.errors:
                full = mtf.Shape([*shard_dims, *piece.variable.shape.dims])
                piece.errors[name] = self._new(name, full, dtype, start, note)
            made = PieceOfState(piece.errors[name], piece, shard_dims)
        else:
            name = name if piece is None else f"{name}/{piece.number}"
            full = mtf.Shape([*shard_dims, *shape.dims])
            if begins_anew:
                # The checkpoint of another number of shards may then have any shape.
                note = {"num_shard_dims": len(full.dims), "fill": start}
            made = self._new(name, full, dtype, start, note)
        self.made.append(made)
        return made

    def _new(
        self, name: str, shape: mtf.Shape, dtype: tf.DType, start: float, note: dict[str, Any]
    ) -> mtf.Variable:
        mesh = self._gradients.mesh
        taken = mesh.graph.name_to_variable
        if self._if_taken and name in taken:
            name = f"{name}/{self._if_taken}"
            # Fragments of outer values are reduced one by one: each takes the next free number.
            others = (f"{name}/{number}" for number in itertools.count(2))
            name = next(n for n in itertools.chain([name], others) if n not in taken)
        if name in taken:
            raise ValueError(
                f"The graph has a variable {name!r} already: a strategy with state reduces a "
                "gradient once in a graph. Give apply_grads all variables at once, and give two "
                "optimizers of one graph different names and variables."
            )
        made = named_state(mesh, name, shape, dtype, start=start, **note)
        self._slots.record([made], [variable_of(v) for v in self._gradients.variables])
        return made

    def report(self, compression: Compression) -> None:
        self.compression = compression


@dataclasses.dataclass(eq=False)
class ReductionsByStrategies:
    """The reductions in a step that strategies make by their own method `reduce_gradients`.

    Attributes:
      slots: the `SlotBook` in which the state of strategies is recorded.
      strategies: the strategies that have reduced gradients.
      new_state: pairs of a state variable of a strategy and its new value, not written yet.
      compressions: for each group of gradients that a strategy compresses, the bytes of the
        gradients and the bytes that it sends.
    """

    slots: SlotBook
    strategies: list[Strategy] = dataclasses.field(default_factory=list)
    new_state: list[tuple[mtf.Variable, mtf.Tensor]] = dataclasses.field(default_factory=list)
    compressions: list[Compression] = dataclasses.field(default_factory=list)
    # The variables of the step's gradients that are reduced.
    _reduced: set[mtf.Variable] = dataclasses.field(default_factory=set)

    def reduce(
        self,
        gradients: GradientSet,
        reduction: ReductionSettings,
        extra: bool = False,
        is_mean: bool = False,
    ) -> GradientSet:
        """Returns gradients after a reduction by `Strategy.reduce_gradients`.

        A gradient that is no sum over shards, or that was reduced already, is returned as it is.
        The new values of the strategy's state are added to `new_state`, and the caller writes them.

        On a mesh of one shard there is nothing to reduce, but all gradients pass through the
        strategy. So the strategy's state exists on a mesh of one shard, too. A checkpoint with the
        state can then be moved from a mesh of several shards to a mesh of one shard, and back.

        Args:
          gradients: the gradients, in any form.
          reduction: how to reduce them, by a strategy that reduces gradients itself.
          extra: whether `gradients` holds other values than the step's gradients, such as the
            differences of values that outer steps reduce. A strategy may keep state for these
            values and for the gradients. If the graph has a variable of a state's name already, the
            new name ends with the wrapper's name.
          is_mean: whether the caller divides the sums by the number of shards. It matters if each
            shard has state, and a run goes on with another number of shards. If `is_mean` is true,
            the mean of the shards' state is kept; if it is false, its sum.

        Raises:
          ValueError: the mesh is not known, there are several meshes, or the graph has another
            variable of the name of a state variable.
          TypeError: the strategy's state is not a structure of variables that its maker made.
        """
        if gradients.form.is_reduced:
            return gradients
        strategy, axes = reduction.strategy, reduction.axes
        first: dict[mtf.Mesh, str] = {}
        for variable in gradients.owners:
            first.setdefault(variable_of(variable).mesh, repr(variable.name))
        if len(first) > 1:
            raise ValueError(
                f"{type(strategy).__name__} keeps state for the cores of one mesh, but the "
                f"variables {', '.join(first.values())} are on different meshes: make a "
                f"{reduction.name} for the variables of each mesh, with a name= of its own, or "
                "give reducer= a strategy without state."
            )
        if axes is None:
            what = "the cores that gradients are reduced over"
            axes = find_replica_axes(gradients.present, reduction.batch_dims) or axes_of_pipeline(
                reduction.name, what, reduction.batch_dims
            )
        self.strategies.append(strategy)
        sums: dict[mtf.Variable, mtf.Tensor] = {}
        before: Collection[mtf.Variable] = () if extra else self._reduced
        for shard_dims, pairs in _group_by_shard_dims(gradients, axes, before).items():
            variables, given = [v for v, _ in pairs], [g for _, g in pairs]
            some = [] if shard_dims == axes.shard_dims else [d.name for d in shard_dims]
            name = "/".join([reduction.name, *some])
            maker = _Maker(gradients, name, self.slots, reduction.name if extra else "", is_mean)
            described = [
                GradientOfCores(v.name, v.shape, shard_dims, g.dtype, axes.slice_shape(v.shape))
                for g, v in zip(given, variables)
            ]
            state = strategy.gradient_state(described, maker)
            held = [v for v in tf.nest.flatten(state) if v is not None]
            if len(held) != len(maker.made) or set(held) != set(maker.made):
                raise TypeError(
                    f"{type(strategy).__name__}.gradient_state must return the variables that its "
                    f"maker made, each once, in a NamedTuple, tuple, list or dict, got {state!r}."
                )
            made = ReduceGradients(given, variables, shard_dims, axes, strategy, state)
            sums.update(zip(variables, made.sums))
            for one, value in made.new_state:
                if isinstance(one, PieceOfState):
                    one, value = one.variable, one.put_back(value)
                self.new_state.append((one, value))
            compression = maker.compression
            if compression is not None:
                self.compressions.append(compression)
                others = ", ".join(compression.whole)
                _logger.info(
                    "%s of %s sends %d bytes of gradients in place of %d, %.3g of them%s.",
                    type(strategy).__name__,
                    reduction.name,
                    compression.sent,
                    compression.given,
                    compression.sent / max(1, compression.given),
                    f"; not compressed: {others}" if others else "",
                )
        if not extra:
            self._reduced.update(sums)
        return gradients.with_grads(
            [sums.get(v, g) for g, v in zip(gradients.grads, gradients.variables)]
        )


def _group_by_shard_dims(
    gradients: GradientSet, axes: ReplicaAxes, reduced_before: Collection[mtf.Variable]
) -> dict[tuple[mtf.Dimension, ...], list[tuple[mtf.Variable, mtf.Tensor]]]:
    """Groups the gradients that are to be reduced by the shard dims over which they are summed.

    The result has a list of pairs (variable, gradient) for each tuple of shard dims. Left out are
    gradients that are not sums over shards, and gradients of variables in `reduced_before`.
    """
    found: dict[tuple[mtf.Dimension, ...], list[tuple[mtf.Variable, mtf.Tensor]]] = {}
    pending = pending_over_shards(gradients.present, axes)
    for grad, variable, is_pending in zip(gradients.present, gradients.owners, pending):
        is_sum = is_pending or any(d not in variable.shape.dims for d in grad.shape.dims)
        # A gradient that the layout splits over a replica axis has no sum over that axis.
        shard_dims = axes.free_shard_dims(variable.shape)
        takes_part = axes.num_shards == 1 or (is_sum and shard_dims)
        if takes_part and variable not in reduced_before:
            found.setdefault(shard_dims, []).append((variable, grad))
    return found
