"""Norms of gradients in a stack of wrappers."""

from __future__ import annotations

import logging
from typing import Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._warn import warn_once
from mtf_gradsync.gradients.clipping import clipping_of
from mtf_gradsync.gradients.measures import global_norm, shard_norms
from mtf_gradsync.gradients.pending import gradient_name
from mtf_gradsync.gradients.recoverable import Apart, summed_elsewhere
from mtf_gradsync.gradients.stages import per_shard, shard_dims_in
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.state.variables import named_state
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step import Branch, WriteInPlace, values_after

_logger = logging.getLogger("mtf_gradsync")


def norm_before_clipping(grads: Sequence[mtf.Tensor]) -> mtf.Tensor | None:
    """Returns the norm of gradients before they were clipped; None if they were not."""
    clipping = clipping_of(grads)
    return None if clipping is None or clipping.norm.shape.ndims else clipping.norm


def norm_of_reduced(grads: Sequence[mtf.Tensor], strategy: Strategy) -> mtf.Tensor:
    """Returns the norm of reduced gradients, for clipped ones from the norm before."""
    clipping = clipping_of(grads)
    if clipping is not None and not clipping.norm.shape.ndims:
        return mtf.multiply(clipping.norm, clipping.factor)
    return global_norm(grads, strategy)


def norms_of_shards(
    grads: Sequence[mtf.Tensor], axes: ReplicaAxes, strategy: Strategy
) -> tuple[mtf.Tensor | None, mtf.Tensor | None]:
    """Returns the norms of per-shard gradients before and after clipping by shard.

    Each is `[shards...]`, the same on all processors; the second is None if they were not clipped,
    and both are if per-shard gradients are not recoverable, or only by sums of their size, or are
    on several meshes.
    """
    if len({g.mesh for g in grads}) > 1:
        return None, None
    clipping = clipping_of(grads)
    if clipping is not None and clipping.norm.shape.ndims:
        both = mtf.stack([clipping.norm, mtf.multiply(clipping.norm, clipping.factor)], "reported")
        both = mtf.anonymize(both)
        before, after = mtf.unstack(both, both.shape.dims[0])
        return before, after
    own = [None if shard_dims_in(g.shape, axes) else g for g in grads]
    apart = Apart(own, axes)
    mixed = {**apart.mixed, **apart.shared}
    reason = "know of all shards" if mixed else "take sums over other mesh axes first"
    unfit = sorted(mixed) or summed_elsewhere(own, axes)
    if unfit:
        text = "Norms of shards are not reported: %d gradients %s, such as %s."
        what = (len(unfit), reason, gradient_name(grads[unfit[0]]))
        if any(axes.free_shard_dims(grads[i].shape) != axes.shard_dims for i in mixed):
            # The variable's layout mixes shards, and nothing that the program does.
            warn_once("norms of shards", text, *what)
        else:
            _logger.info(text, *what)
        return None, None
    shards = per_shard(grads, axes, strategy)
    return mtf.anonymize(shard_norms(shards, axes, strategy)), None


def kept(values: Sequence[mtf.Tensor], branch: Branch, name: str) -> list[mtf.Tensor]:
    """Returns scalars of a branch as they were when it last ran, in float32.

    A variable `name`, which is in no checkpoint, keeps them. They are NaN before the branch has run
    in this session.
    """
    dim = mtf.Dimension("reported", len(values) + 1)
    mesh, shape = values[0].mesh, mtf.anonymous_shape(mtf.Shape([dim]))
    variable = named_state(mesh, name, shape, tf.float32, checkpointed=False)
    branch.plan.write_in_place(variable)
    with branch.opened():
        # The last element is 1 once the branch has run.
        one = mtf.constant(mesh, 1.0, mtf.Shape([]), tf.float32)
        together = mtf.stack([*(mtf.cast(x, tf.float32) for x in values), one], shape.dims[0].name)
        write = WriteInPlace([variable], [together], tf.assign, "keep_reported")
    branch.updates.append(write)
    (held,) = values_after([variable], [write])
    *known, has_run = mtf.unstack(held, shape.dims[0])
    return [mtf.cwise(_or_nan, [value, has_run]) for value in known]


def _or_nan(value: tf.Tensor, has_run: tf.Tensor) -> tf.Tensor:
    return tf.where_v2(has_run > 0, value, np.float32(np.nan))
