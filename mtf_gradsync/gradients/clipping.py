"""Clips gradients by each shard's own norm, or by the global norm."""

from __future__ import annotations

import functools
from typing import Any, Container, NamedTuple, Sequence, Union

import numpy as np

from mtf_gradsync._common import FLOAT32_MAX, check_flag, check_number, is_number, walk, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import gradients_calls, loop_body
from mtf_gradsync.gradients.arguments import (
    Bounds,
    check_gradients,
    check_one_mesh,
    is_tensor,
    scalar_of_step,
)
from mtf_gradsync.gradients.measures import common_shard_dims, global_norm, shard_norms
from mtf_gradsync.gradients.operations import (
    GradientOperation,
    MaybeGradients,
    gradient_name,
    map_by_mesh,
    map_present,
    on_mesh,
    reduced_values,
)
from mtf_gradsync.gradients.shards import per_shard, sum_shards
from mtf_gradsync.mesh.axes import ReplicaAxes, check_axes
from mtf_gradsync.reduce import FusedAllReduce, Strategy, check_strategy
from mtf_gradsync.step.plan import PlanExtension, StepPlan

ClipNorm = Union[float, tf.Tensor, tf.Variable, mtf.Tensor, mtf.Variable]


class Clipping(NamedTuple):
    """The norm that one clip found, and the factor that it multiplied gradients by.

    Attributes:
      norm: the gradients' norm before the clip.
      factor: the factor that the gradients were multiplied by; it has the norm's shape.
      size: the number of gradients that were clipped together.
    """

    norm: mtf.Tensor
    factor: mtf.Tensor
    size: int


class ScaleGradients(GradientOperation):
    """A product of each gradient of a mesh with one factor, or with one factor per shard.

    Attributes:
      clipping: the norm and the factor of the clip for which the products are made. The same clip
        may have made products of gradients on other meshes.
    """

    def __init__(self, grads: Sequence[mtf.Tensor], factor: mtf.Tensor, clipping: Clipping):
        self.clipping = clipping
        super().__init__(
            [*grads, factor], [g.shape for g in grads], "scale_gradients", [g.dtype for g in grads]
        )

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        *grads, factor = self.inputs
        names = {d.name for d in factor.shape.dims}
        *values, factor_value = reduced_values(lowering, self.inputs)
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
    """Checks that clip_norm is a number above 0, or a scalar tensor or variable (tf or mtf).

    Raises ValueError for numbers that are not above 0 and for tensors with dimensions, and
    TypeError for values of other types.
    """
    if is_number(clip_norm):
        # A number too large for float32 limits nothing; one too small would make every gradient 0.
        check_number("clip_norm", min(clip_norm, FLOAT32_MAX), "greater than 0", above=True)
    elif not is_tensor(clip_norm):
        raise TypeError(
            "clip_norm must be a number, or a scalar tensor or variable of TensorFlow or Mesh-TF, "
            f"got {clip_norm!r}."
        )
    elif clip_norm.shape.ndims != 0:
        raise ValueError(f"clip_norm must be a scalar, got {clip_norm!r}.")


class _ClippedTogether(PlanExtension):
    """A graph's record of which gradients were clipped together, and of their losses.

    The record serves to warn of a program that clips some gradients of a loss by one norm, and
    other gradients of the same loss by another norm.
    """

    def __init__(self) -> None:
        self._made: tuple[tuple[frozenset, frozenset], ...] = ()

    def add(self, grads: Sequence[mtf.Tensor]) -> None:
        """Records that the gradients `grads` are clipped by one norm.

        Warns if an earlier call has recorded gradients of the same loss, and none of these is among
        the gradients that `grads` are computed from.
        """
        calls = {y: call for call in gradients_calls(grads[0].graph) for y in call.outputs}
        found = [t for t in walk(grads, functools.partial(_sources, ends=calls)) if t in calls]
        losses = frozenset(_unscaled(x) for t in found for x in calls[t].losses)
        for others, of_losses in self._made:
            if losses & of_losses and others.isdisjoint(found):
                name = gradient_name(found[0])
                warn_once(
                    "clipped in groups",
                    "Some gradients of a loss are clipped by one norm and others by another, and "
                    "neither is the norm of all gradients: %s was clipped apart from %s. Give all "
                    "gradients to one call, or all variables to one wrapper, unless this is meant.",
                    name,
                    gradient_name(next(iter(others))),
                )
        self._made += ((frozenset(found), losses),)


def _sources(tensor: mtf.Tensor, ends: Container[mtf.Tensor]) -> Sequence[mtf.Tensor]:
    """Returns the tensors that a tensor is directly computed from; none if it is in `ends`.

    If an operation on a list of gradients has made the tensor, the operation has an output for each
    gradient of the list. Then only the gradient at the same position as the tensor is returned.
    """
    if tensor in ends:
        return ()
    operation = tensor.operation
    number = operation.outputs.index(tensor) if tensor in operation.outputs else 0
    if isinstance(operation, mtf.WhileLoopOperation):
        return [loop_body(operation).outputs[number]] if operation.outputs else ()
    inputs = operation.inputs
    is_list = isinstance(operation, GradientOperation) and len(inputs) >= len(operation.outputs) > 1
    return [inputs[number]] if is_list else inputs


def _unscaled(loss: mtf.Tensor) -> mtf.Tensor:
    while isinstance(loss.operation, mtf.ScalarMultiplyOperation):
        (loss,) = loss.operation.inputs
    return loss


def clip_together(
    grads: MaybeGradients,
    clip_norm: ClipNorm,
    axes: ReplicaAxes | None,
    strategy: Strategy,
    owner: str,
    earlier_grads: Sequence[mtf.Tensor] | None = None,
) -> tuple[list[mtf.Tensor | None], mtf.Tensor | None]:
    """Scales gradients down so that their norm is at most `clip_norm`; arguments are not checked.

    Args:
      grads: if `axes` is None, reduced gradients, which are scaled by the norm over all of them.
        If `axes` is given, per-shard gradients: those of each shard are scaled by the norm over
        this shard's gradients. None passes through.
      clip_norm: the largest norm: a number above 0, or a scalar tensor or variable.
      axes: the replica axes of per-shard gradients, or None.
      strategy: the strategy that reduces the norm.
      owner: the name of the optimizer or function that clip_norm was given to, for errors.
      earlier_grads: the gradients that `grads` were computed from. They serve to warn of a program
        that clips gradients of one loss by several norms. They need to be given only if the inputs
        of operations do not lead back from `grads` to them, as with accumulated gradients. None
        takes `grads`.

    Returns:
      The clipped gradients, in order, and the norm before clipping: a scalar, or of shape `[shard
      dims...]` with `axes`. The norm is None if every gradient is None.
    """
    present = [g for g in grads if g is not None]
    if not present:
        return list(grads), None
    StepPlan.of(present[0].graph).extension(_ClippedTogether).add(earlier_grads or present)
    norm = global_norm(present, strategy) if axes is None else shard_norms(present, axes, strategy)
    if is_tensor(clip_norm):
        limit = scalar_of_step(clip_norm, norm.mesh, norm.dtype, "clip_norm", owner, Bounds(0.0))
        factor = mtf.cwise(_clip_factor, [norm, limit])
    else:
        with np.errstate(over="ignore"):  # a number too large for float32 clips nothing
            limit = norm.dtype.as_numpy_dtype(clip_norm)
        factor = mtf.cwise(functools.partial(_clip_factor, limit=limit), [norm])
    clipping = Clipping(norm, factor, len(present))

    def scaled(mesh: mtf.Mesh, some: list[mtf.Tensor]) -> Sequence[mtf.Tensor]:
        return ScaleGradients(some, on_mesh(factor, mesh), clipping).outputs

    return map_present(grads, lambda some: map_by_mesh(some, scaled)), norm


def _clip_factor(norm: tf.Tensor, limit: Any) -> tf.Tensor:
    """Returns the factor, at most 1, that scales gradients whose norm is `norm` down to `limit`.

    `limit` is a number or a scalar, and the factor has the shape and dtype of `norm`. As in
    TensorFlow, the factor is NaN if the norm is not finite. The factor is also NaN if the norm is
    so large that the dtype has no normal number for the factor.
    """
    limit = tf.cast(limit, norm.dtype)
    tiny = np.finfo(norm.dtype.as_numpy_dtype).tiny
    # Mesh-TF also divides by way of the reciprocal, which is no normal number for huge norms.
    factor = limit * tf.math.reciprocal(norm)
    factor = tf.where_v2(norm < 0.5 / tiny, factor, limit / norm)
    is_exact = tf.logical_or(factor >= tiny, limit <= 0)  # a limit of 0 makes all gradients 0
    factor = tf.where_v2(tf.logical_and(is_exact, tf.math.is_finite(norm)), factor, np.nan)
    keeps = tf.logical_or(norm <= limit, tf.math.is_inf(limit))
    return tf.where_v2(keeps, tf.ones_like(factor), factor)


def clipping_of(grads: Sequence[mtf.Tensor]) -> Clipping | None:
    """Returns the clip that made `grads`; None unless `grads` are all outputs of a single clip."""
    found = {id(c): c for c in (getattr(g.operation, "clipping", None) for g in grads)}
    (clipping,) = found.values() if len(found) == 1 else (None,)
    return clipping if clipping is not None and clipping.size == len(grads) else None


def unclipped(grad: mtf.Tensor) -> mtf.Tensor:
    """Returns a gradient as it was before this package clipped it.

    A gradient that this package did not clip is returned as it is.
    """
    operation = grad.operation
    if not isinstance(operation, ScaleGradients):
        return grad
    return operation.inputs[operation.outputs.index(grad)]


def clip_by_shard_norm(
    grads: MaybeGradients,
    clip_norm: ClipNorm,
    axes: ReplicaAxes,
    reducer: Strategy | None = None,
    accept_summed: bool = False,
) -> tuple[list[mtf.Tensor | None], mtf.Tensor | None]:
    """Clips each shard's gradients by that shard's own norm over all gradients.

    Huge gradients of one shard do not scale down the gradients of other shards. The layout may
    split the dimensions of a gradient over a replica axis (the gradient of an expert, say). Then
    each part of the gradient counts in the norm of the shard that holds this part. Norms are
    float32 (float64 for float64 gradients), and are computed correctly even if squares of gradients
    overflow or underflow. If a shard's norm is not finite, all gradients of that shard become NaN.
    The same happens if a norm in float32 is more than about 2^126 times clip_norm.

    Args:
      grads: gradients, pending or per shard; None passes through.
      clip_norm: the largest norm that a shard's gradients may have: a number greater than 0, or a
        scalar tensor or variable. If the value of a tensor or variable is less than 0 or NaN, the
        step raises an error. With infinity nothing is clipped.
      axes: the replica axes.
      reducer: the strategy that reduces over mesh axes other than the replica axes; None takes
        `FusedAllReduce()`.
      accept_summed: what happens if shards' own gradients are not recoverable from a gradient. If
        true, each shard takes an equal share of the gradient; if false, it is an error.

    Returns:
      The clipped gradients, per shard (`[shard dims...] + var dims`), and the norms before
      clipping, of shape `[shard dims...]`. The norm is None if every gradient is None.

    Raises:
      ValueError: clip_norm is not greater than 0, gradients have different shard dims, or
        per-shard gradients are not recoverable.
      TypeError: an argument is of the wrong type.

    References:
      Pascanu et al., "On the difficulty of training recurrent neural networks", 2013. The clip is
      made per shard, as the documentation of `tf.compat.v1.tpu.CrossShardOptimizer` advises.
    """
    grads = check_gradients(grads)
    check_one_mesh(grads, "clip_by_shard_norm")
    check_axes(axes)
    check_clip_norm(clip_norm)
    accept_summed = check_flag("accept_summed", accept_summed)
    strategy = check_strategy(FusedAllReduce() if reducer is None else reducer)
    common_shard_dims([g for g in grads if g is not None], axes)
    shards = per_shard(grads, axes, strategy, accept_summed)
    return clip_together(shards, clip_norm, axes, strategy, "clip_by_shard_norm")


def clip_by_global_norm(
    grads: MaybeGradients, clip_norm: ClipNorm, reducer: Strategy | None = None
) -> tuple[list[mtf.Tensor | None], mtf.Tensor | None]:
    """Clips reduced gradients, of one mesh or several, by the norm over all of them.

    Args:
      grads: gradients of shape `var dims`; pending ones are reduced first. None passes through.
      clip_norm: the largest norm that all gradients together may have: a number greater than 0, or
        a scalar tensor or variable. If the value of a tensor or variable is less than 0 or NaN, the
        step raises an error. With infinity nothing is clipped.
      reducer: the reduction strategy; None takes `FusedAllReduce()`.

    Returns:
      The clipped reduced gradients, and the norm before clipping. The norm is a scalar, of float64
      if a gradient is float64, and of float32 otherwise; it is None if every gradient is None.

    Raises:
      ValueError: clip_norm is not greater than 0.
      TypeError: an argument is of the wrong type.

    References:
      Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
    """
    grads = check_gradients(grads)
    check_clip_norm(clip_norm)
    strategy = check_strategy(FusedAllReduce() if reducer is None else reducer)
    sums = sum_shards(grads, None, strategy)
    return clip_together(sums, clip_norm, None, strategy, "clip_by_global_norm")
