"""Norms of gradients that a stack of wrappers has seen."""

from __future__ import annotations

import logging
from typing import Callable, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients import (
    clipping_of,
    global_norm,
    mixed_gradients,
    per_shard,
    shard_dims_in,
    shard_norms,
    summed_elsewhere,
)
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.seen import Seen
from mtf_gradsync.reduce import Strategy

_logger = logging.getLogger("mtf_gradsync")


def in_branch(seen: Seen, make: Callable[[], mtf.Tensor]) -> mtf.Tensor:
    """What a function makes, where the gradients are."""
    if seen.branch is None:
        return make()
    made = []

    def build() -> list[mtf.Operation]:
        made.append(make())
        return []

    seen.branch.add(build)
    return made[0]


def norm_before_clipping(seen: Seen) -> mtf.Tensor | None:
    """The norm that clipping has made of gradients before it; None for other gradients."""
    clipping = clipping_of(seen.grads)
    return None if clipping is None or clipping.norm.shape.ndims else clipping.norm


def whole_norm(seen: Seen, strategy: Strategy) -> mtf.Tensor:
    """The norm of whole gradients; of clipped ones, from what clipping knows."""
    clipping = clipping_of(seen.grads)
    if clipping is not None and not clipping.norm.shape.ndims:
        return in_branch(seen, lambda: mtf.multiply(clipping.norm, clipping.factor))
    return in_branch(seen, lambda: global_norm(seen.grads, strategy))


def norms_of_shards(
    seen: Seen, axes: ReplicaAxes, strategy: Strategy
) -> tuple[mtf.Tensor | None, mtf.Tensor | None]:
    """The norms of the shards' own gradients, on all processors.

    Args:
      seen: gradients on all steps, pending or per shard.
      axes: the replica axes.
      strategy: how sums cross the mesh.

    Returns:
      Norms before and after clipping by shard, each `[shards...]`; None as the second where they
      were not clipped. None as both where shards cannot be told apart, or only by sums of the size
      of gradients.
    """
    clipping = clipping_of(seen.grads)
    if clipping is not None and clipping.norm.shape.ndims:
        before, after = _on_all([clipping.norm, mtf.multiply(clipping.norm, clipping.factor)])
        return before, after
    own = [None if shard_dims_in(g.shape, axes) else g for g in seen.grads]
    mixed = mixed_gradients(own, axes)
    reason = "know of all shards" if mixed else "take sums over other mesh axes first"
    unfit = list(mixed) or summed_elsewhere(own, axes)
    if unfit:
        _logger.info(
            "Norms of shards are left out: %d gradients %s, such as %s.",
            len(unfit),
            reason,
            seen.grads[unfit[0]].name,
        )
        return None, None
    shards = per_shard(seen.grads, axes, strategy)
    return _on_all([shard_norms(shards, axes, strategy)])[0], None


def _on_all(values: Sequence[mtf.Tensor]) -> Sequence[mtf.Tensor]:
    """Tensors of one shape, whole on every processor; they cross the mesh together."""
    if len(values) == 1:
        return [mtf.anonymize(values[0])]
    together = mtf.anonymize(mtf.stack(list(values), "reported"))
    return mtf.unstack(together, together.shape.dims[0])
