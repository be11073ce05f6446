"""Sends gradients as low-rank factors of matrices."""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from mtf_gradsync._common import check_flag, check_whole_number, is_number, map_by_key
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.patches import late_configurable
from mtf_gradsync._private.tensorflow import control_flow_v1
from mtf_gradsync.mesh.axes import ProcessorGroups, is_simd
from mtf_gradsync.reduce.compressed import GradientStrategy, add_errors, cast_like, zero_errors
from mtf_gradsync.reduce.strategy import Compression, GradientOfCores, State, StateMaker, Strategy
from mtf_gradsync.reduce.sums import check_values

_PHILOX = 1
# A column counts as spanned by those before it if less than this share of its length remains.
_ROUNDING = 2.0**-22
# A matrix whose largest number is smaller counts as zeros.
_SMALLEST = 2.0**-100


def num_row_dims(shape: Sequence[int]) -> int:
    """Returns how many of the first dimensions of a shape should make the rows of a matrix.

    The dimensions that do not make the rows make the columns. The result is chosen so that the sum
    of the numbers of rows and columns is smallest: low-rank factors have as many numbers as this
    sum, times the rank.

    Examples:
      >>> num_row_dims([3, 3, 64, 128])  # a matrix of 576 rows and 128 columns
      3
    """

    def factors(number: int) -> int:
        return math.prod(shape[:number]) + math.prod(shape[number:])

    return min(range(len(shape) + 1), key=factors)


def random_factors(
    columns: Sequence[int], rank: int, step: tf.Tensor | int
) -> tuple[tf.Tensor, ...]:
    """Returns a random float32 matrix `[size, rank]` for each size in `columns`, in this order.

    `step` is the number of the reduction, an integer scalar: each number gives other matrices. The
    matrices of one step are the same on all processors and in every run.
    """
    raw, made = tf.raw_ops, []
    count = tf.cast(tf.reshape(step, [1]), tf.uint64)
    for number, size in enumerate(columns):
        counter = tf.concat([tf.constant([number], tf.uint64), count], 0)
        made.append(
            raw.StatelessRandomNormalV2(
                shape=[size, rank], key=tf.constant([0], tf.uint64), counter=counter, alg=_PHILOX
            )
        )
    return tuple(made)


def replace_zero_columns(factor: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Returns `factor`, each of whose columns of zeros is replaced by that column of `other`.

    `factor` and `other` are matrices of one shape.
    """
    dead = tf.reduce_all(tf.equal(factor, 0.0), 0, keepdims=True)
    return tf.where_v2(dead, other, factor)


def orthonormal(matrices: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """Returns matrices ``[rows, rank]`` with their columns made orthonormal.

    The matrices are float32 and may have different numbers of rows and columns. The method is
    Gram-Schmidt, applied twice to each column. A column that is a combination of earlier columns,
    up to rounding, becomes zeros. A matrix with an infinity or a NaN becomes NaN as a whole.
    """

    def of_one_shape(_: Any, members: list[int]) -> Sequence[tf.Tensor]:
        stacked = _orthonormal(tf.stack([matrices[i] for i in members]))
        return tf.unstack(stacked, len(members))

    return tuple(map_by_key([tuple(x.shape.as_list()) for x in matrices], of_one_shape))


def _orthonormal(x: tf.Tensor) -> tf.Tensor:
    """Makes the columns of matrices of one shape orthonormal; `orthonormal` calls this.

    The matrices are stacked: `x` and the result are float32 tensors ``[matrices, rows, rank]``.
    """
    finite = tf.reduce_all(tf.math.is_finite(x), [1, 2], keepdims=True)
    top = tf.reduce_max(tf.abs(x), [1, 2], keepdims=True)
    # Matrices are scaled, because squares of huge or tiny numbers are outside of float32's range.
    x = x / tf.where_v2(tf.logical_and(finite, top >= _SMALLEST), top, 1.0)
    made: list[tf.Tensor] = []
    for column in tf.unstack(x, axis=2):
        length = _length(column)
        for _ in range(2):
            # Sums are used instead of matmul, which TPUs round to bfloat16.
            column -= sum(b * tf.reduce_sum(b * column, 1, keepdims=True) for b in made)
        left = _length(column)
        dead = left <= _ROUNDING * length
        made.append(tf.where_v2(dead, 0.0, column / tf.where_v2(dead, 1.0, left)))
    return tf.where_v2(finite, tf.stack(made, 2), np.float32(np.nan))


def _length(column: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(tf.reduce_sum(tf.square(column), 1, keepdims=True))


def laid_out_cond(
    mesh_impl: Any,
    predicate: tf.Tensor,
    if_true: Callable[[], Any],
    if_false: Callable[[], Any],
) -> Any:
    """Returns the `LaidOutTensor`s that `if_true` or `if_false` returns, depending on `predicate`.

    The function is a `tf.cond` for values on a mesh: only operations of `if_true` or only those of
    `if_false` run. The predicate is a boolean scalar that has to be the same on all processors.
    Both functions return equal nested structures of values of the same shapes and dtypes, or Nones.
    The result has this structure, too. On a placement mesh each slice is on its processor's device.
    """
    structure: Any = None

    def slices(make: Callable[[], Any]) -> list[tf.Tensor]:
        nonlocal structure
        structure = make()
        laid_out = [x for x in tf.nest.flatten(structure) if x is not None]
        if is_simd(mesh_impl):
            return [tf.identity(x.one_slice) for x in laid_out]
        return [
            one
            for x in laid_out
            for one in mtf.parallel(mesh_impl.devices, tf.identity, x.tensor_list)
        ]

    def place(operation: tf.Operation) -> str:
        # TensorFlow would place the merge of the branches on any device.
        joins = operation.type == "Merge" and not operation.device
        return operation.inputs[0].device if joins else operation.device

    with control_flow_v1(), tf.device(place):
        flat = tf.cond(predicate, lambda: slices(if_true), lambda: slices(if_false))
    each = 1 if is_simd(mesh_impl) else mesh_impl.size
    starts = iter(range(0, len(flat), each))

    def joined(x: Any) -> Any:
        if x is None:
            return None
        start = next(starts)
        return mesh_impl.LaidOutTensor(list(flat[start : start + each]))

    return tf.nest.map_structure(joined, structure)


class LowRankState(NamedTuple):
    """The state of `LowRankAllReduce`; fields that the settings do not need are None."""

    step: Any  # the number of reductions so far
    errors: tuple[Any, ...]  # for each gradient the part of it that cores have not sent
    factors: tuple[Any, ...]  # for each gradient the right factor of the last sum, transposed


class _Matrix(NamedTuple):
    """The sizes of a gradient's matrix, which is sent as factors [rows, rank] and [columns, rank].

    The matrix is a core's slice of the gradient, reshaped to `[rows, columns]`.
    """

    split: int  # how many of the tensor's dimensions make the rows
    rows: int
    columns: int
    rank: int

    @property
    def num_sent(self) -> int:
        """The number of elements of both factors together."""
        return self.rank * (self.rows + self.columns)


@late_configurable(module="mtf_gradsync")
class LowRankAllReduce(GradientStrategy):
    """A strategy that sends gradients as low-rank factors of matrices: PowerSGD.

    Each core reshapes its gradient to a matrix M whose numbers of rows and columns are as equal as
    possible.

    1. Q is a matrix with `rank` orthonormal columns, the same on all cores.
    2. P is the sum of M Q over the cores. The columns of P are then made orthonormal.
    3. Q becomes the sum, over the cores, of the transposed M times P.
    4. The sum of the gradients is approximated by P times the transposed Q.

    In these four steps a core sends rank * (rows + columns) numbers in place of rows * columns.
    There are two reductions: one of all P's and of the gradients that are not compressed, and one
    of all Q's. If the factors have the full rank of the matrix, the sum is exact.

    **Error feedback.** A core keeps the error of compression: M minus what the core has added to
    the result. The core adds this error to its next gradient, so that all gradients are applied in
    the end, up to rounding.

    **Model parallel.** If the layout splits a variable over mesh axes that are no replica axes,
    each core compresses its own slice of the gradient as a matrix. Nothing is sent over those axes,
    and `rank` is the rank of a slice.

    **Not finite.** If a gradient has a NaN or an infinity on any core, the whole sum of the
    gradient is NaN, and cores keep no error of this gradient.

    **Not compressed.** Vectors, and matrices that factors make less than `min_compression_rate`
    times smaller, are reduced by `reducer`. `mtf_gradsync.reported(optimizer)` gives the
    compression rate that is reached, and the log names the gradients that are not compressed.

    In a `ShardedUpdateOptimizer` each replica receives the whole sums and takes its parts of them.

    The state is kept in these variables: `<variable>/low_rank_error`, with a value for each core;
    `<variable>/low_rank_factor` (Q), which begins anew if the mesh changes and has other slices;
    `<wrapper>/low_rank_step`, if start_step is given or warm_start is off.

    Examples:
      >>> reducer = gs.LowRankAllReduce(rank=4)
      >>> opt = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1), reducer=reducer)
      >>> print(gs.describe(opt))
      every step  reduce over the replica axes: low rank, 4  (CrossShardOptimizer)
                  update by Sgd

    References:
      PowerSGD (Vogels et al. 2019), algorithms 1 and 2. Unlike in the paper, Q is orthonormal, too,
      so that directions with small singular values are not lost if the rank is almost full. Columns
      of Q that have become zero are replaced by random ones.
    """

    def __init__(
        self,
        rank: int = 4,
        start_step: int = 0,
        min_compression_rate: float = 2.0,
        warm_start: bool = True,
        error_feedback: bool = True,
        reducer: Strategy | None = None,
    ):
        """Sets how and from which update on gradients are compressed.

        Args:
          rank: the largest number of columns of a factor.
          start_step: the number of updates, from the first one on, that are not compressed.
          min_compression_rate: how many times smaller than a gradient its factors have to be.
          warm_start: whether a step begins with the factor Q of the previous step, instead of
            random numbers.
          error_feedback: whether a core keeps the error of compression, a float32 tensor of the
            gradient's size, and adds it to its next gradient.
          reducer: the strategy that sums the factors and everything that is not compressed; None
            takes `FusedAllReduce()`.

        Raises:
          TypeError: reducer is not a strategy, or a flag is not a bool.
          ValueError: a number is out of range.
        """
        super().__init__(reducer)
        self.rank = check_whole_number("rank", rank)
        self.start_step = check_whole_number("start_step", start_step, 0)
        rate = min_compression_rate
        if not is_number(rate) or not 0 < rate < math.inf:
            raise ValueError(f"min_compression_rate must be a number above 0, got {rate!r}.")
        self.min_compression_rate = float(rate)
        self.warm_start = check_flag("warm_start", warm_start)
        self.error_feedback = check_flag("error_feedback", error_feedback)

    def gradient_state(self, gradients: Sequence[GradientOfCores], maker: StateMaker) -> State:
        maker.report(self._compression(gradients))
        matrices = [self._matrix_of(g.dtype, g.slice_shape) for g in gradients]
        # Slices on another mesh may be compressed.
        whole = [self._matrix_of(g.dtype, g.shape.to_integer_list) for g in gradients]
        errors = tuple(
            maker.variable(f"{g.name}/low_rank_error", g.shape, shard_dims=g.shard_dims)
            if self.error_feedback and (here or elsewhere)
            else None
            for g, here, elsewhere in zip(gradients, matrices, whole)
        )
        factors = tuple(
            maker.variable(f"{g.name}/low_rank_factor", _factor_shape(g, m), begins_anew=True)
            if self.warm_start and m is not None
            else None
            for g, m in zip(gradients, matrices)
        )
        counts = any(matrices) and (self.start_step > 0 or not self.warm_start)
        name = f"{maker.name}/low_rank_step"
        step = maker.variable(name, mtf.Shape([]), tf.int32) if counts else None
        return LowRankState(step, errors, factors)

    def reduce_gradients(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, state: State
    ) -> tuple[list[Any], State]:
        self.check(mesh_impl, groups)
        check_values(values)
        wanted = add_errors(mesh_impl, values, state.errors)
        matrices = {}
        for i, x in enumerate(values):
            matrix = self._matrix_of(x.tensor_list[0].dtype, x.slice_shape)
            if matrix is not None:
                matrices[i] = matrix

        def as_they_are() -> tuple[list[Any], list[Any], list[Any]]:
            given = [cast_like(mesh_impl, x, value) for x, value in zip(wanted, values)]
            sums = self.reducer.all_reduce(mesh_impl, given, groups)
            return sums, zero_errors(mesh_impl, state.errors), list(state.factors)

        as_factors = functools.partial(
            self._reduce_as_factors, mesh_impl, values, wanted, groups, state, matrices
        )
        if groups.group_size == 1 or not matrices:
            sums, errors, factors = as_they_are()
        elif self.start_step:
            late = tf.greater_equal(state.step.tensor_list[0], self.start_step)
            sums, errors, factors = laid_out_cond(mesh_impl, late, as_factors, as_they_are)
        else:
            sums, errors, factors = as_factors()
        step = None if state.step is None else mesh_impl.slicewise(lambda x: x + 1, state.step)
        return list(sums), LowRankState(step, tuple(errors), tuple(factors))

    def _reduce_as_factors(
        self,
        mesh_impl: Any,
        values: Sequence[Any],
        wanted: Sequence[Any],
        groups: ProcessorGroups,
        state: LowRankState,
        matrices: dict[int, _Matrix],
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Sums gradients as low-rank factors; returns the sums, and the new errors and factors.

        Args:
          mesh_impl: the mesh.
          values: the gradients, whose dtypes the sums get.
          wanted: the gradients plus the compression errors of earlier steps.
          groups: the groups of processors that sum with each other.
          state: the state before this reduction.
          matrices: the sizes of the matrix of each gradient that is sent as factors, by the
            gradient's position in `values`. All other gradients are reduced whole.

        Returns:
          Three lists of `LaidOutTensor`s in the order of `values`: the sums, the errors and the
          factors. Errors and factors are None where the state has None.
        """
        made = list(matrices.values())
        whole = [i for i in range(len(values)) if i not in matrices]

        def initial_factors(*factors: tf.Tensor) -> tuple[tf.Tensor, ...]:
            """Returns the Q of each matrix at the start of this step; its columns are orthonormal.

            With a warm start, `factors` are the Qs of the last step, one for each matrix. Without a
            warm start, `factors` has one element, the number of the step, which seeds random Qs.
            """
            step = 0 if self.warm_start else factors[0]

            def of_one_rank(rank: int, members: list[int]) -> Sequence[tf.Tensor]:
                return random_factors([made[i].columns for i in members], rank, step)

            drawn = map_by_key([m.rank for m in made], of_one_rank)
            if self.warm_start:
                last = [tf.reshape(q, [m.rank, m.columns]) for q, m in zip(factors, made)]
                drawn = [replace_zero_columns(tf.transpose(q), new) for q, new in zip(last, drawn)]
            return orthonormal(drawn)

        def times(*xs: tf.Tensor, transposed: bool = False) -> tuple[tf.Tensor, ...]:
            pairs = zip(made, xs[: len(made)], xs[len(made) :])
            return tuple(
                tf.matmul(
                    tf.reshape(tf.cast(x, tf.float32), [m.rows, m.columns]),
                    factor,
                    transpose_a=transposed,
                )
                for m, x, factor in pairs
            )

        def product(p: tf.Tensor, q: tf.Tensor, like: Any) -> tf.Tensor:
            return tf.reshape(tf.matmul(p, q, transpose_b=True), like)

        def left(x: tf.Tensor, p: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
            error = tf.cast(x, tf.float32) - product(p, q, x.shape.as_list())
            return tf.where_v2(tf.math.is_finite(error), error, 0.0)

        def transposed_if_finite(q: tf.Tensor) -> tf.Tensor:
            finite = tf.reduce_all(tf.math.is_finite(q))
            return tf.transpose(tf.where_v2(finite, q, 0.0))

        start = [state.factors[i] for i in matrices] if self.warm_start else [state.step]
        grads = [wanted[i] for i in matrices]
        first = mesh_impl.slicewise(times, *grads, *mesh_impl.slicewise(initial_factors, *start))
        as_given = [cast_like(mesh_impl, wanted[i], values[i]) for i in whole]
        # Gradients that are not compressed share the reduction of the first factors.
        reduced = self.reducer.all_reduce(mesh_impl, [*as_given, *first], groups)
        ps = mesh_impl.slicewise(lambda *xs: orthonormal(xs), *reduced[len(whole) :])
        own = mesh_impl.slicewise(functools.partial(times, transposed=True), *grads, *ps)
        qs = self.reducer.all_reduce(mesh_impl, list(own), groups)
        sums: list[Any] = list(values)
        errors = zero_errors(mesh_impl, state.errors)
        factors: list[Any] = list(state.factors)
        for i, x in zip(whole, reduced):
            sums[i] = x
        for i, p, q_of_core, q in zip(matrices, ps, own, qs):
            shape = values[i].slice_shape
            total = mesh_impl.slicewise(lambda p, q, to=shape: product(p, q, to), p, q)
            sums[i] = cast_like(mesh_impl, total, values[i])
            if errors[i] is not None:
                errors[i] = mesh_impl.slicewise(left, wanted[i], p, q_of_core)
            if factors[i] is not None:
                to = factors[i].slice_shape
                factors[i] = mesh_impl.slicewise(
                    lambda q, to=to: tf.reshape(transposed_if_finite(q), to), q
                )
        return sums, errors, factors

    def _matrix_of(self, dtype: tf.DType, shape: Sequence[int]) -> _Matrix | None:
        """Returns the sizes of a gradient's matrix and factors; None if it is reduced whole.

        `dtype` is the gradient's dtype, and `shape` is the shape of a core's slice of the gradient.
        """
        if not dtype.is_floating or math.prod(shape) == 0:
            return None
        split = num_row_dims(shape)
        rows, columns = math.prod(shape[:split]), math.prod(shape[split:])
        matrix = _Matrix(split, rows, columns, min(self.rank, rows, columns))
        pays = rows * columns >= self.min_compression_rate * matrix.num_sent
        return matrix if pays and min(rows, columns) > 1 else None

    def _compression(self, gradients: Sequence[GradientOfCores]) -> Compression:
        given = sent = 0
        whole = []
        for gradient in gradients:
            size = mtf.list_product(gradient.slice_shape) * gradient.dtype.size
            matrix = self._matrix_of(gradient.dtype, gradient.slice_shape)
            given += size
            sent += size if matrix is None else 4 * matrix.num_sent
            if matrix is None:
                whole.append(gradient.name)
        return Compression(given, sent, tuple(whole))


def _factor_shape(gradient: GradientOfCores, matrix: _Matrix) -> mtf.Shape:
    """Returns the shape of the variable that keeps the transposed factors Q of a gradient.

    A factor Q has the shape [columns, rank], and the variable holds it as [rank, columns]. So the
    variable's last dimensions are the rank, and those dimensions of the gradient that make the
    columns of the matrix. If the layout splits dimensions that make the rows, each slice of the
    gradient has its own Q. The variable's first dimensions then number the slices.
    """
    slices = [
        mtf.Dimension(dim.name, dim.size // size)
        for dim, size in zip(gradient.shape.dims, gradient.slice_shape)
    ]
    of_rows = [dim for dim in slices[: matrix.split] if dim.size > 1]
    columns = gradient.shape.dims[matrix.split :]
    return mtf.Shape([*of_rows, mtf.Dimension("low_rank", matrix.rank), *columns])
