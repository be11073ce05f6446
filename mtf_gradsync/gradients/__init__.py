"""Gradients as stages: per shard, summed, clipped."""

from mtf_gradsync.gradients.clipping import (
    check_clip_norm,
    clip_by_global_norm,
    clip_by_shard_norm,
    clipping_of,
    global_norm,
    not_finite,
    shard_norms,
    shards_not_finite,
)
from mtf_gradsync.gradients.copies import (
    SumCopies,
    check_group_assignment,
    check_groups_cover,
)
from mtf_gradsync.gradients.losses import ScaledLosses, take_without_scale, unscaled_gradients
from mtf_gradsync.gradients.stage import StageOperation
from mtf_gradsync.gradients.stages import (
    SumGradients,
    check_axes,
    check_gradients,
    on_present,
    per_shard,
    shard_dims_in,
    sum_shards,
)
from mtf_gradsync.gradients.told_apart import (
    check_told_apart,
    mixed_gradients,
    pending_over_shards,
    summed_elsewhere,
)

__all__ = [
    "ScaledLosses",
    "StageOperation",
    "SumCopies",
    "SumGradients",
    "check_axes",
    "check_clip_norm",
    "check_gradients",
    "check_group_assignment",
    "check_groups_cover",
    "check_told_apart",
    "clip_by_global_norm",
    "clip_by_shard_norm",
    "clipping_of",
    "global_norm",
    "mixed_gradients",
    "not_finite",
    "on_present",
    "pending_over_shards",
    "per_shard",
    "shard_dims_in",
    "shard_norms",
    "shards_not_finite",
    "sum_shards",
    "summed_elsewhere",
    "take_without_scale",
    "unscaled_gradients",
]
