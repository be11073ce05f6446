"""Computes norms over all gradients, and whether all of their entries are finite."""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.arguments import check_one_mesh, check_present
from mtf_gradsync.gradients.operations import (
    GradientOperation,
    MaybeGradients,
    PartialSum,
    map_by_mesh,
    on_mesh,
    partial_sum,
    reduce_partial_sums,
    reduced_values,
)
from mtf_gradsync.gradients.pending import PendingSums
from mtf_gradsync.gradients.shards import shard_dims_in
from mtf_gradsync.mesh.axes import ReplicaAxes, check_axes
from mtf_gradsync.reduce import FusedAllReduce, Strategy, check_strategy
from mtf_gradsync.reduce.compressed import CompressedAllReduce, GradientStrategy
from mtf_gradsync.reduce.sums import ordered_add_n


def _norm_dtype(grads: Sequence[mtf.Tensor]) -> tf.DType:
    return tf.float64 if any(g.dtype == tf.float64 for g in grads) else tf.float32


# A function of slices of gradients, the dims of each slice to sum over, and a dtype. It returns one
# number, or several along the last dimension.
Measure = Callable[[Sequence[tf.Tensor], Sequence[Sequence[int]], tf.DType], tf.Tensor]


def _factors_for_squares(dtype: tf.DType) -> tuple[float, float]:
    """Returns two factors for values that are to be squared: for small and for large values.

    `dtype` is the dtype of the squares. Both factors are powers of two, so that multiplying by them
    rounds nothing. For small norms (below 2^24 in float32) values are multiplied by the first
    factor: even the norm of 2^12 values as small as 2^-97 is found. For all other norms that the
    dtype can hold, values are multiplied by the second factor.
    """
    exponents = math.frexp(dtype.max)[1]  # 128 for float32
    return 2.0 ** (exponents * 5 // 16), 2.0 ** -(exponents // 2 + 1)


def _scaled(x: tf.Tensor, scale: float) -> tf.Tensor:
    """Returns x * scale in a form whose square XLA does not rewrite.

    XLA turns the square of x * scale into x * x * scale^2, which overflows. A minimum with the
    dtype's largest number prevents this rewrite, and changes no square.
    """
    return tf.minimum(x * scale, x.dtype.max)


def _sums_of_squares(
    slices: Sequence[tf.Tensor], over: Sequence[Sequence[int]], dtype: tf.DType
) -> tf.Tensor:
    """Returns sums of squares over all slices, as a tensor of `dtype`; its last dimension is 2.

    There are two sums, because values are multiplied by one of the two `_factors_for_squares` for
    the first sum, and by the other for the second. `over` has for each slice the positions of the
    dims to sum over. Dims that are left are flattened to one. `_norm_of_sums` turns the sums into
    the norm.
    """
    values = [tf.cast(x, dtype) for x in slices]
    if all(len(dims) == x.shape.rank for x, dims in zip(slices, over)):
        # l2_loss is one operation in place of two; its factor of a half is exact.
        sums = [[tf.nn.l2_loss(_scaled(x, s)) for x in values] for s in _factors_for_squares(dtype)]
        return 2.0 * tf.stack([ordered_add_n(some) for some in sums])
    sums = [
        [_flat(tf.reduce_sum(tf.square(_scaled(x, s)), dims)) for x, dims in zip(values, over)]
        for s in _factors_for_squares(dtype)
    ]
    return tf.stack([ordered_add_n(some) for some in sums], axis=-1)


def _norm_of_sums(sums: tf.Tensor) -> tf.Tensor:
    """Returns the norm, computed from a tensor of the form that `_sums_of_squares` returns.

    The norm has the shape of `sums` without the last dimension.
    """
    small, large = tf.unstack(sums, axis=-1)
    up, down = _factors_for_squares(sums.dtype)
    return tf.where_v2(tf.math.is_finite(small), tf.sqrt(small) / up, tf.sqrt(large) / down)


def _any_not_finite(
    slices: Sequence[tf.Tensor], over: Sequence[Sequence[int]], dtype: tf.DType
) -> tf.Tensor:
    """Returns 1 if an entry of some slice is NaN or infinite, else 0, as a tensor of `dtype`.

    `over` has for each slice the positions of the dims to combine. If a slice has further dims, the
    result is a vector with a number for each position along them. Entries that are not finite are
    not counted, because counting takes more passes over the slices.
    """
    finite = [tf.reduce_all(tf.math.is_finite(x), dims) for x, dims in zip(slices, over)]
    together = tf.reduce_all(tf.stack([_flat(x) for x in finite]), axis=0)
    return tf.cast(tf.logical_not(together), dtype)


def _without_compression(strategy: Strategy) -> Strategy:
    """Returns the strategy inside of a `CompressedAllReduce`; returns any other strategy unchanged.

    The returned strategy reduces in the dtype of its inputs. Norms are reduced by it, because sums
    of squares overflow in float16.
    """
    if isinstance(strategy, CompressedAllReduce):
        return _without_compression(strategy.reducer)
    if isinstance(strategy, GradientStrategy) and isinstance(strategy.reducer, CompressedAllReduce):
        return _without_compression(strategy.reducer)
    return strategy


def _flat(x: tf.Tensor) -> tf.Tensor:
    """Flattens a tensor to a vector; returns a scalar as it is, which saves an operation."""
    return x if x.shape.rank < 2 else tf.reshape(x, [-1])


class SumOverGradients(GradientOperation):
    """A sum of a measure, such as squares, over all gradients of a mesh, or over each shard's."""

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        shard_dims: Sequence[mtf.Dimension],
        axes: ReplicaAxes | None,
        strategy: Strategy,
        measure: Measure,
        numbers: Sequence[mtf.Dimension] = (),
    ):
        self._measure = measure
        self._numbers = list(numbers)
        self._shard_dims = list(shard_dims)
        self._axes = axes
        self._strategy = strategy
        batch_dims = None if axes is None else axes.batch_dims
        PendingSums.declare_use(grads, True, batch_dims, strategy)
        super().__init__(
            grads,
            [mtf.Shape([*self._shard_dims, *self._numbers])],
            name="sum_over_gradients",
            dtypes=[_norm_dtype(grads)],
        )

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        if self._axes is not None:
            self._axes.check_mesh_impl(mesh_impl)
        output = self.outputs[0]
        slice_shape = mesh_impl.slice_shape(output.shape)
        shard_axes = set(mesh_impl.tensor_layout(output.shape))
        values = reduced_values(lowering, self.inputs)
        # Only processors with different slices of a gradient add up; copies would count twice.
        by_axes: dict[tuple[int, ...], list[tuple[Any, list[int]]]] = {}
        of_shards = slice_shape[: len(self._shard_dims)]
        names = {d.name for d in self._shard_dims if math.prod(of_shards) > 1}
        for grad, value in zip(self.inputs, values):
            split = set(mesh_impl.tensor_layout(grad.shape)) - {None} - shard_axes
            over = [i for i, d in enumerate(grad.shape.dims) if d.name not in names]
            by_axes.setdefault(tuple(sorted(split)), []).append((value, over))
        sums = []
        for mesh_axes, members in by_axes.items():
            laid_out, overs = zip(*members)

            def add_up(*slices: tf.Tensor, overs: Any = overs) -> tf.Tensor:
                return tf.reshape(self._measure(slices, overs, output.dtype), slice_shape)

            sums.append(PartialSum(mesh_impl.slicewise(add_up, *laid_out), mesh_axes))
        parts = reduce_partial_sums(mesh_impl, sums, _without_compression(self._strategy))
        total = mesh_impl.slicewise(lambda *xs: ordered_add_n(xs), *parts)
        self.set_outputs(lowering, [total])


class NotFinite(GradientOperation):
    """Flags that tell which gradients of which shards have a NaN or an infinity.

    The output is a float32 tensor `[shards..., gradients]`. A flag is greater than 0 if an entry of
    the shard's gradient is not finite. Pending gradients are not reduced to compute the flags.
    """

    takes_pending = True

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        axes: ReplicaAxes | None,
        strategy: Strategy,
        of_shards_only: bool = False,
        shared: float = 0.0,
    ):
        """Adds the operation that computes the flags, for gradients of one mesh.

        Args:
          grads: the gradients, pending, reduced or per shard.
          axes: the replica axes; None makes an output with one flag for each gradient, and not for
            each shard.
          strategy: the strategy that reduces the flags.
          of_shards_only: whether a gradient that is the same on all shards gets the flag `shared`,
            whatever its entries are.
          shared: if `of_shards_only` is true, the flag of gradients that are the same on all
            shards.
        """
        self._strategy, self._of_shards_only, self._shared = strategy, of_shards_only, shared
        self._shard_dims = list(axes.shard_dims) if axes else []
        names = axes.batch_dims if axes else None
        PendingSums.declare_use(grads, False, names, strategy)
        shape = mtf.Shape([*self._shard_dims, mtf.Dimension("gradients", len(grads))])
        super().__init__(grads, [shape], "not_finite", [tf.float32])

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl, (output,) = lowering.mesh_impl(self), self.outputs
        slice_shape = mesh_impl.slice_shape(output.shape)
        parts = [partial_sum(lowering, grad) for grad in self.inputs]
        own = set(mesh_impl.tensor_layout(output.shape)) - {None}
        counts = [
            not (self._of_shards_only and own)
            or bool(own.intersection([*part.mesh_axes, *mesh_impl.tensor_layout(grad.shape)]))
            for grad, part in zip(self.inputs, parts)
        ]

        def look(*slices: tf.Tensor) -> tf.Tensor:
            finite = [tf.reduce_all(tf.math.is_finite(x)) for x in slices]
            found = 1.0 - tf.cast(tf.stack(finite), tf.float32)
            found = tf.where_v2(tf.constant(counts), found, tf.constant(self._shared))
            return tf.reshape(found, slice_shape)

        found = mesh_impl.slicewise(look, *[part.value for part in parts])
        others = tuple(axis for axis in range(mesh_impl.shape.ndims) if axis not in own)
        (found,) = reduce_partial_sums(mesh_impl, [PartialSum(found, others)], self._strategy)
        self.set_outputs(lowering, [found])


# The last dimension of `_sums_of_squares`.
_RANGES = mtf.Dimension("ranges_of_squares", 2)


def _sum_of_measure(
    grads: MaybeGradients,
    reducer: Strategy | None,
    measure: Measure,
    axes: Any = None,
    of_shards: str = "",
    numbers: Sequence[mtf.Dimension] = (),
) -> mtf.Tensor:
    """Returns the sum of a measure, such as squares, over the entries of all gradients.

    The result is an mtf tensor `[shards..., numbers...]` on the mesh of the first gradient.

    Args:
      grads: the gradients; None counts as zeros.
      reducer: the reduction strategy; None takes `FusedAllReduce()`.
      measure: the function of slices that computes the measure.
      axes: the replica axes, if each shard is to have its own result.
      of_shards: if each shard is to have its own result, the name of the function that was called,
        for errors. If the name is empty, there is one result for all shards, and no shard dim.
      numbers: the dimensions of what `measure` returns; none for a single number.
    """
    grads = check_present(grads)
    strategy = check_strategy(FusedAllReduce() if reducer is None else reducer)
    shard_dims: Sequence[mtf.Dimension] = ()
    if of_shards:
        check_axes(axes)
        check_one_mesh(grads, of_shards)
        shard_dims = common_shard_dims(grads, axes)
    dtype = _norm_dtype(grads)

    def of_mesh(mesh: mtf.Mesh) -> mtf.Tensor:
        some = [g for g in grads if g.mesh is mesh]
        total = SumOverGradients(some, shard_dims, axes, strategy, measure, numbers).outputs[0]
        return on_mesh(total if total.dtype == dtype else mtf.cast(total, dtype), grads[0].mesh)

    return functools.reduce(mtf.add, map(of_mesh, dict.fromkeys(g.mesh for g in grads)))


def _norms(
    grads: MaybeGradients, reducer: Strategy | None, axes: Any = None, of_shards: str = ""
) -> mtf.Tensor:
    sums = _sum_of_measure(grads, reducer, _sums_of_squares, axes, of_shards, [_RANGES])
    return _NormOfSums(sums).outputs[0]


class _NormOfSums(GradientOperation):
    """The norms, from a tensor of sums that `_sums_of_squares` made, whose last dimension is 2."""

    def __init__(self, sums: mtf.Tensor):
        super().__init__([sums], [sums.shape - _RANGES], "norm")

    def lower(self, lowering: mtf.Lowering) -> None:
        sums = reduced_values(lowering, self.inputs)
        self.set_outputs(lowering, [lowering.mesh_impl(self).slicewise(_norm_of_sums, *sums)])


def global_norm(grads: MaybeGradients, reducer: Strategy | None = None) -> mtf.Tensor:
    """Returns the global norm: the root of the sum of all squares of all gradients.

    Gradients may be on one mesh or on several.

    Args:
      grads: gradients that are pending (they are reduced first), reduced, or per shard. The norm of
        gradients per shard is over all shards' entries. None counts as zeros.
      reducer: the reduction strategy; None takes `FusedAllReduce()`.

    Returns:
      An mtf scalar on the first gradient's mesh, of float64 if a gradient is float64, and of
      float32 otherwise.

    Raises:
      TypeError: an argument is of the wrong type, or a gradient has an integer dtype.
      ValueError: there is no gradient, or gradients are of several graphs.
    """
    return _norms(grads, reducer)


def shard_norms(
    grads: MaybeGradients, axes: ReplicaAxes, reducer: Strategy | None = None
) -> mtf.Tensor:
    """Returns the norm of each shard's gradients.

    Args:
      grads: gradients per shard, `[shard dims...] + var dims`; None counts as zeros.
      axes: the replica axes.
      reducer: the reduction strategy; None takes `FusedAllReduce()`.

    Returns:
      An mtf tensor `[shard dims...]`, of float64 if a gradient is float64, and of float32
      otherwise.

    Raises:
      TypeError: an argument is of the wrong type, or a gradient has an integer dtype.
      ValueError: there is no gradient, or gradients have different shard dims, or they are on
        several meshes.
    """
    return _norms(grads, reducer, axes, "shard_norms")


def joined_norm(norms: Sequence[mtf.Tensor]) -> mtf.Tensor:
    """Returns the norm over several sets of gradients together, given the norm of each set.

    The norms are mtf tensors of equal shape on one mesh. The result is such a tensor, too, of
    float64 if a norm is float64, and of float32 otherwise.
    """

    def join(*norms: tf.Tensor) -> tf.Tensor:
        by_scale = [
            [tf.square(_scaled(x, s)) for x in norms] for s in _factors_for_squares(norms[0].dtype)
        ]
        return _norm_of_sums(tf.stack([ordered_add_n(some) for some in by_scale], axis=-1))

    dtype = _norm_dtype(norms)
    return mtf.cwise(join, [mtf.cast(x, dtype) for x in norms], dtype)


def not_finite(grads: MaybeGradients, reducer: Strategy | None = None) -> mtf.Tensor:
    """Returns a float mtf scalar: 0 if all entries of gradients are finite, else more than 0.

    Args:
      grads: gradients that are pending (they are reduced first), reduced, or per shard. None is
        passed over.
      reducer: the reduction strategy; None takes `FusedAllReduce()`.

    Returns:
      An mtf scalar on the first gradient's mesh, of float64 if a gradient is float64, and of
      float32 otherwise.

    Raises:
      TypeError: an argument is of the wrong type, or a gradient has an integer dtype.
      ValueError: there is no gradient, or gradients are of several graphs.
    """
    return _sum_of_measure(grads, reducer, _any_not_finite)


def which_not_finite(
    grads: Sequence[mtf.Tensor],
    axes: ReplicaAxes | None = None,
    reducer: Strategy | None = None,
    of_shards_only: bool = False,
    shared: float = 0.0,
) -> mtf.Tensor:
    """Returns flags of shape `[shards..., gradients]` that tell which gradients are not finite.

    A flag is greater than 0 if an entry of the shard's gradient is NaN or infinite. Flags are
    float32, and every processor has all of them.

    Args:
      grads: the gradients, at least one. They may be on several meshes if `axes` is None, and the
        flags are then on the mesh of the first gradient.
      axes: the replica axes. None makes one flag for each gradient, without shard dims.
      reducer: the reduction strategy; None takes `FusedAllReduce()`.
      of_shards_only: whether a gradient that is the same on all shards gets the flag `shared`,
        whatever its entries are.
      shared: if `of_shards_only` is true, the flag of gradients that are the same on all shards.
    """
    strategy = check_strategy(FusedAllReduce() if reducer is None else reducer)
    home = grads[0].mesh
    if all(g.mesh is home for g in grads):
        return mtf.anonymize(NotFinite(grads, axes, strategy, of_shards_only, shared).outputs[0])

    def of_mesh(mesh: mtf.Mesh, some: list[mtf.Tensor]) -> list[mtf.Tensor]:
        del mesh
        found = mtf.anonymize(NotFinite(some, None, strategy, of_shards_only, shared).outputs[0])
        return mtf.unstack(on_mesh(found, home), found.shape.dims[0])

    return mtf.anonymize(mtf.stack(map_by_mesh(grads, of_mesh), "gradients"))


def shards_not_finite(
    grads: MaybeGradients, axes: ReplicaAxes, reducer: Strategy | None = None
) -> mtf.Tensor:
    """Returns a float mtf tensor `[shard dims...]`: 0 for shards whose entries are all finite.

    The value is greater than 0 for shards that have a NaN or an infinity. `grads` are gradients per
    shard, `[shard dims...] + var dims`; None is passed over. `axes` are the replica axes, and
    `reducer` is the reduction strategy (None takes `FusedAllReduce()`). Raises the same errors as
    `shard_norms`.
    """
    return _sum_of_measure(grads, reducer, _any_not_finite, axes, "shards_not_finite")


def common_shard_dims(grads: Sequence[mtf.Tensor], axes: ReplicaAxes) -> list[mtf.Dimension]:
    """Returns the shard dims of the gradients, which have to be the same for all gradients.

    If a gradient has no shard dims, those that `per_shard` would give it for the replica axes
    `axes` are taken. Raises ValueError if gradients have different shard dims. Returns [] if there
    are no gradients.
    """
    shard_dims: list[mtf.Dimension] = []
    for grad in grads:
        found = {d.name: d for d in shard_dims_in(grad.shape, axes)}
        dims = [found.get(d.name, d) for d in axes.shard_dims]
        if shard_dims not in ([], dims):
            raise ValueError(
                f"Gradients have different shard dims: {mtf.Shape(shard_dims)} and "
                f"{mtf.Shape(dims)} (of {grad.name}); give each gradient the same."
            )
        shard_dims = dims
    return shard_dims
