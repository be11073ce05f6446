"""Gradient accumulation: several microbatch steps for each update."""

from mtf_gradsync.optimizers.accumulation.optimizer import (
    GradientAccumulationOptimizer,
    get_update_step,
)
from mtf_gradsync.optimizers.accumulation.skipping import skip_large_updates, skip_not_finite

__all__ = [
    "GradientAccumulationOptimizer",
    "get_update_step",
    "skip_large_updates",
    "skip_not_finite",
]
