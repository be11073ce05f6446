"""Optimizers of tf.compat.v1: on a mesh, and wrapped without a mesh by counterparts of wrappers."""

from typing import TYPE_CHECKING

from mtf_gradsync._private.lazy import lazy_names
from mtf_gradsync.compat_v1.mesh_optimizer import MeshOptimizer
from mtf_gradsync.compat_v1.opt_argument import (
    NOT_GIVEN,
    AllReduceFn,
    AppliesGradients,
    MeshOptimizerLike,
    OptimizerLike,
    Reduction,
    given_optimizer,
    is_v1,
)

if TYPE_CHECKING:
    from mtf_gradsync.compat_v1.accumulation import (
        CrossShardOptimizer,
        GradientAccumulationOptimizer,
        SyncReplicasOptimizer,
    )
else:  # a type checker that saw `__getattr__` would take any name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "CrossShardOptimizer": "mtf_gradsync.compat_v1.accumulation",
            "GradientAccumulationOptimizer": "mtf_gradsync.compat_v1.accumulation",
            "SyncReplicasOptimizer": "mtf_gradsync.compat_v1.accumulation",
        },
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
