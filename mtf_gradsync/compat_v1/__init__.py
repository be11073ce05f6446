"""Optimizers of tf.compat.v1 on a mesh, and this package's wrappers around them without a mesh."""

from mtf_gradsync.compat_v1.accumulation import (
    AllReduceFn,
    CrossShardOptimizer,
    GradientAccumulationOptimizer,
    Reduction,
    SyncReplicasOptimizer,
)
from mtf_gradsync.compat_v1.mesh_optimizer import MeshOptimizer
from mtf_gradsync.compat_v1.rules import (
    NOT_GIVEN,
    AppliesGradients,
    MeshOptimizerLike,
    OptimizerLike,
    given_optimizer,
    is_v1,
)

__all__ = [
    "NOT_GIVEN",
    "AllReduceFn",
    "AppliesGradients",
    "CrossShardOptimizer",
    "GradientAccumulationOptimizer",
    "MeshOptimizer",
    "MeshOptimizerLike",
    "OptimizerLike",
    "Reduction",
    "SyncReplicasOptimizer",
    "given_optimizer",
    "is_v1",
]
