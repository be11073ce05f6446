"""Functions on gradients: split by shard, sum over shards, clip, measure."""

from mtf_gradsync.gradients.clipping import clip_by_global_norm, clip_by_shard_norm
from mtf_gradsync.gradients.measures import global_norm, not_finite, shard_norms, shards_not_finite
from mtf_gradsync.gradients.shards import per_shard, sum_shards

__all__ = [
    "clip_by_global_norm",
    "clip_by_shard_norm",
    "global_norm",
    "not_finite",
    "per_shard",
    "shard_norms",
    "shards_not_finite",
    "sum_shards",
]
