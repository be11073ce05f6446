"""Clipping by each shard's own norm and by the norm of the whole gradient."""

from __future__ import annotations

import collections
import math
import numbers
from typing import Any, Callable, Sequence, Union

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.partial_sums import PartialSum, reduce_partial_sums
from mtf_gradsync.gradients.pending import PendingSums
from mtf_gradsync.gradients.stage import StageOperation, whole_values
from mtf_gradsync.gradients.stages import (
    MaybeGradients,
    check_axes,
    check_gradients,
    on_present,
    per_shard,
    shard_dims_in,
    sum_shards,
)
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.reduce import FusedAllReduce, Strategy, check_strategy
from mtf_gradsync.reduce.sums.algorithms import ordered_add_n

ClipNorm = Union[float, tf.Tensor, mtf.Tensor]


def _norm_dtype(grads: Sequence[mtf.Tensor]) -> tf.DType:
    return tf.float64 if any(g.dtype == tf.float64 for g in grads) else tf.float32


# From slices of gradients, and for each of them the dims to sum over, to one number in a dtype.
Measure = Callable[[Sequence[tf.Tensor], Sequence[Sequence[int]], tf.DType], tf.Tensor]


def _sum_of_squares(
    slices: Sequence[tf.Tensor], over: Sequence[Sequence[int]], dtype: tf.DType
) -> tf.Tensor:
    values = [tf.cast(x, dtype) for x in slices]
    if all(len(dims) == x.shape.rank for x, dims in zip(slices, over)):
        # One operation for each in place of two; the half comes and goes without rounding.
        return 2.0 * ordered_add_n([tf.nn.l2_loss(x) for x in values])
    sums = [tf.reduce_sum(tf.square(x), dims) for x, dims in zip(values, over)]
    return ordered_add_n([_flat(x) for x in sums])


def _any_not_finite(
    slices: Sequence[tf.Tensor], over: Sequence[Sequence[int]], dtype: tf.DType
) -> tf.Tensor:
    """1 if an entry is NaN or infinite, else 0: fewer passes than counting them."""
    finite = [tf.reduce_all(tf.math.is_finite(x), dims) for x, dims in zip(slices, over)]
    together = tf.reduce_all(tf.stack([_flat(x) for x in finite]), axis=0)
    return tf.cast(tf.logical_not(together), dtype)


def _flat(x: tf.Tensor) -> tf.Tensor:
    """As a vector; a scalar stays one, which saves an operation for each gradient."""
    return x if x.shape.rank < 2 else tf.reshape(x, [-1])


class SumOverGradients(StageOperation):
    """Sums something over all gradients: of each shard, or one sum for all."""

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        shard_dims: Sequence[mtf.Dimension],
        axes: ReplicaAxes | None,
        strategy: Strategy,
        measure: Measure = _sum_of_squares,
    ):
        self._measure = measure
        self._shard_dims = list(shard_dims)
        self._axes = axes
        self._strategy = strategy
        batch_dims = None if axes is None else axes.batch_dims
        PendingSums.want(grads, True, batch_dims, strategy)
        super().__init__(
            grads,
            [mtf.Shape(self._shard_dims)],
            name="sum_over_gradients",
            dtypes=[_norm_dtype(grads)],
        )

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        if self._axes is not None:
            self._axes.check_mesh_impl(mesh_impl)
        output = self.outputs[0]
        slice_shape = mesh_impl.slice_shape(output.shape)
        shard_axes = set(mesh_impl.tensor_layout(output.shape))
        values = whole_values(lowering, self.inputs)
        # Processors that hold different parts of a gradient add up their squares; those that
        # hold copies must not.
        by_axes: dict[tuple[int, ...], list[Any]] = collections.OrderedDict()
        for grad, value in zip(self.inputs, values):
            split = set(mesh_impl.tensor_layout(grad.shape)) - {None} - shard_axes
            local_shards = {d.name for d in self._shard_dims}
            keep = [i for i, d in enumerate(grad.shape.dims) if d.name in local_shards]
            by_axes.setdefault(tuple(sorted(split)), []).append((value, keep))
        sums = []
        for mesh_axes, members in by_axes.items():
            keeps = [keep for _, keep in members]

            def add_up(*slices: tf.Tensor, keeps: Any = keeps) -> tf.Tensor:
                one = math.prod(slice_shape) == 1
                over = [
                    [i for i in range(x.shape.rank) if one or i not in keep]
                    for x, keep in zip(slices, keeps)
                ]
                return tf.reshape(self._measure(slices, over, output.dtype), slice_shape)

            value = mesh_impl.slicewise(add_up, *[value for value, _ in members])
            sums.append(PartialSum(value, mesh_axes))
        parts = reduce_partial_sums(mesh_impl, sums, self._strategy)
        total = mesh_impl.slicewise(lambda *xs: ordered_add_n(xs), *parts)
        self.set_outputs(lowering, [total])


class ScaleGradients(StageOperation):
    """Multiplies gradients by one factor, or each shard's gradients by that shard's factor.

    Attributes:
      norm: their norm before.
      factor: of the same shape.
    """

    def __init__(self, grads: Sequence[mtf.Tensor], factor: mtf.Tensor, norm: mtf.Tensor):
        self.norm, self.factor = norm, factor
        super().__init__(
            [*grads, factor], [g.shape for g in grads], "scale_gradients", [g.dtype for g in grads]
        )

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        *grads, factor = self.inputs
        names = {d.name for d in factor.shape.dims}
        *values, factor_value = whole_values(lowering, self.inputs)
        scaled = []
        for grad, value in zip(grads, values):
            kept = [d.name in names for d in grad.shape.dims]

            def scale(x: tf.Tensor, f: tf.Tensor, kept: Sequence[bool] = tuple(kept)) -> tf.Tensor:
                wide = [size if keep else 1 for size, keep in zip(x.shape.as_list(), kept)]
                # The factor's dtype is the wider one; rounding once keeps the norm in bounds.
                return tf.cast(tf.cast(x, f.dtype) * tf.reshape(f, wide), x.dtype)

            scaled.append(mesh_impl.slicewise(scale, value, factor_value))
        self.set_outputs(lowering, scaled)


def check_clip_norm(clip_norm: Any) -> None:
    """Raises ValueError or TypeError if clip_norm is neither a positive number nor a scalar."""
    number = isinstance(clip_norm, numbers.Real) and not isinstance(clip_norm, bool)
    if number and not (clip_norm > 0 and math.isfinite(clip_norm)):
        raise ValueError(f"clip_norm must be finite and greater than 0, got {clip_norm!r}.")
    if not number and not isinstance(clip_norm, (mtf.Tensor, tf.Tensor)):
        raise TypeError(
            f"clip_norm must be a number, a scalar tf.Tensor or mtf.Tensor, got {clip_norm!r}."
        )
    if isinstance(clip_norm, mtf.Tensor) and clip_norm.shape.ndims:
        raise ValueError(f"clip_norm must be a scalar, got {clip_norm!r}.")


def _clip(
    grads: MaybeGradients,
    clip_norm: ClipNorm,
    shard_dims: Sequence[mtf.Dimension],
    axes: ReplicaAxes | None,
    strategy: Strategy,
) -> tuple[list[mtf.Tensor | None], mtf.Tensor | None]:
    present = [g for g in grads if g is not None]
    if not present:
        return list(grads), None
    norm = mtf.sqrt(SumOverGradients(present, shard_dims, axes, strategy).outputs[0])
    if isinstance(clip_norm, mtf.Tensor) and clip_norm.dtype != norm.dtype:
        clip_norm = mtf.cast(clip_norm, norm.dtype)
    elif isinstance(clip_norm, tf.Tensor):
        clip_norm = mtf.import_tf_tensor(norm.mesh, tf.cast(clip_norm, norm.dtype), [])
    factor = mtf.divide(clip_norm, mtf.maximum(norm, clip_norm), output_shape=norm.shape)
    # As TensorFlow does: what has no norm becomes NaN as a whole, not zero in silence.
    factor = mtf.cwise(
        lambda f, n: tf.where_v2(tf.math.is_finite(n), f, tf.cast(np.nan, f.dtype)), [factor, norm]
    )
    scaled = on_present(grads, lambda some: ScaleGradients(some, factor, norm).outputs)
    return scaled, norm


def global_norm(grads: Sequence[mtf.Tensor], reducer: Strategy | None = None) -> mtf.Tensor:
    """The root of the sum of the squares of all entries of all gradients.

    Args:
      grads: gradients, at least one; pending ones are summed first. Shard dims count as any
        others.
      reducer: how sums cross the mesh; None takes `FusedAllReduce()`.

    Returns:
      An mtf scalar, float32, or float64 if a gradient is.
    """
    strategy = check_strategy(FusedAllReduce() if reducer is None else reducer)
    return mtf.sqrt(SumOverGradients(list(grads), [], None, strategy).outputs[0])


def shard_norms(
    grads: Sequence[mtf.Tensor], axes: ReplicaAxes, reducer: Strategy | None = None
) -> mtf.Tensor:
    """The norm of each shard's gradients.

    Args:
      grads: gradients per shard (`[shard dims...] + var dims`), at least one.
      axes: the replica axes.
      reducer: as for `global_norm`.

    Returns:
      An mtf tensor of shape `[shard dims...]`, float32, or float64 if a gradient is.

    Raises:
      ValueError: gradients have different shard dims.
    """
    strategy = check_strategy(FusedAllReduce() if reducer is None else reducer)
    dims = _common_shard_dims(grads, axes)
    return mtf.sqrt(SumOverGradients(list(grads), dims, axes, strategy).outputs[0])


def clipping_of(grads: Sequence[mtf.Tensor]) -> ScaleGradients | None:
    """The clipping that gradients come from, all of them and nothing else; None without."""
    operations = {g.operation for g in grads}
    (operation,) = operations if len(operations) == 1 else (None,)
    if not isinstance(operation, ScaleGradients) or len(operation.outputs) != len(grads):
        return None
    return operation


def not_finite(grads: Sequence[mtf.Tensor], reducer: Strategy | None = None) -> mtf.Tensor:
    """Whether a gradient has a NaN or an infinity.

    Args:
      grads: as for `global_norm`.
      reducer: as for `global_norm`.

    Returns:
      A float mtf scalar, the same on all processors: 0 where all entries are finite, else more.
    """
    strategy = check_strategy(FusedAllReduce() if reducer is None else reducer)
    return SumOverGradients(list(grads), [], None, strategy, _any_not_finite).outputs[0]


def shards_not_finite(
    grads: Sequence[mtf.Tensor], axes: ReplicaAxes, reducer: Strategy | None = None
) -> mtf.Tensor:
    """Which shards have gradients with a NaN or an infinity.

    Args:
      grads: gradients per shard (`[shard dims...] + var dims`), at least one.
      axes: the replica axes.
      reducer: as for `global_norm`.

    Returns:
      A float mtf tensor of shape `[shard dims...]`: 0 where all entries are finite, else more.
    """
    strategy = check_strategy(FusedAllReduce() if reducer is None else reducer)
    dims = list(axes.shard_dims)
    return SumOverGradients(list(grads), dims, axes, strategy, _any_not_finite).outputs[0]


def _common_shard_dims(grads: Sequence[mtf.Tensor], axes: ReplicaAxes) -> list[mtf.Dimension]:
    """The shard dims that gradients have or get; empty for no gradients."""
    shard_dims: list[mtf.Dimension] = []
    for grad in grads:
        found = {d.name: d for d in shard_dims_in(grad.shape, axes)}
        dims = [found.get(d.name, d) for d in axes.shard_dims]
        if shard_dims not in ([], dims):
            raise ValueError(
                f"Gradients have different shard dims: {mtf.Shape(shard_dims)} and "
                f"{mtf.Shape(dims)} (of {grad.name}); give each the same."
            )
        shard_dims = dims
    return shard_dims


def clip_by_shard_norm(
    grads: MaybeGradients,
    clip_norm: ClipNorm,
    axes: ReplicaAxes,
    reducer: Strategy | None = None,
    accept_summed: bool = False,
) -> tuple[list[mtf.Tensor | None], mtf.Tensor | None]:
    """Clips each shard's gradients by that shard's own norm over all of them.

    A shard whose gradients are huge is scaled down alone: the others keep theirs. Where a
    gradient is split over a replica axis by its own layout (an expert's), each part counts to
    the shard that holds it. Norms are in float32 (float64 gradients: float64); a norm that is
    not finite, as of squares that overflow, makes all of that shard's gradients NaN.

    Args:
      grads: gradients, pending or per shard; None passes through.
      clip_norm: largest norm of a shard's gradients, greater than 0.
      axes: the replica axes.
      reducer: how sums cross the mesh axes that are not replica axes; None takes
        `FusedAllReduce()`.
      accept_summed: as for `per_shard`.

    Returns:
      The clipped gradients, per shard (`[shard dims...] + var dims`), and the norms before
      clipping, of shape `[shard dims...]`; None as norm when every gradient is None.

    Raises:
      ValueError: clip_norm is not greater than 0, gradients have different shard dims, or the
        shards cannot be told apart in one.
      TypeError: an argument is of the wrong type.

    References:
      Pascanu et al., "On the difficulty of training recurrent neural networks", 2013; per shard
      as the documentation of `tf.compat.v1.tpu.CrossShardOptimizer` advises.
    """
    grads = check_gradients(grads)
    check_axes(axes)
    check_clip_norm(clip_norm)
    strategy = check_strategy(FusedAllReduce() if reducer is None else reducer)
    shard_dims = _common_shard_dims([g for g in grads if g is not None], axes)
    shards = per_shard(grads, axes, strategy, accept_summed)
    return _clip(shards, clip_norm, shard_dims, axes, strategy)


def clip_by_global_norm(
    grads: MaybeGradients, clip_norm: ClipNorm, reducer: Strategy | None = None
) -> tuple[list[mtf.Tensor | None], mtf.Tensor | None]:
    """Clips gradients by the norm over all of them, summed over the whole mesh.

    Args:
      grads: gradients of shape `var dims`; pending ones are summed first, together. None passes
        through.
      clip_norm: largest norm of the result, greater than 0.
      reducer: how sums cross the mesh; None takes `FusedAllReduce()`.

    Returns:
      The clipped gradients, whole on every processor, and the norm before clipping (a scalar in
      float32, or float64 if a gradient is), None when every gradient is None.

    Raises:
      ValueError: clip_norm is not greater than 0.
      TypeError: an argument is of the wrong type.

    References:
      Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
    """
    grads = check_gradients(grads)
    check_clip_norm(clip_norm)
    strategy = check_strategy(FusedAllReduce() if reducer is None else reducer)
    return _clip(sum_shards(grads, None, strategy), clip_norm, [], None, strategy)
