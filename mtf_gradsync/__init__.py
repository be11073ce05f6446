"""Gradient synchronization for Mesh-TensorFlow.

Importing this package makes `mesh_tensorflow` importable on TensorFlow 2.12 and later.
"""

from typing import TYPE_CHECKING

from mtf_gradsync import reduce
from mtf_gradsync._private import libraries as libraries  # first: it repairs Mesh-TF's imports
from mtf_gradsync._private.lazy import find_moved, lazy_names
from mtf_gradsync._private.patches import (
    call_around_lowering,
    configurable_when_named,
    exclude_from_combining,
    patch_libraries,
    patch_when_called,
)
from mtf_gradsync._private.tensorflow import checkpoint_initializers
from mtf_gradsync.compat_v1 import MeshOptimizer
from mtf_gradsync.gradients import (
    clip_by_global_norm,
    clip_by_shard_norm,
    per_shard,
    sum_shards,
)
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers import (
    AverageOptimizer,
    ClipByGlobalNormOptimizer,
    CrossShardOptimizer,
    GradientAccumulationOptimizer,
    LossScaleOptimizer,
    NoUpdateError,
    OuterOptimizer,
    ShardedUpdateOptimizer,
    SyncReplicasOptimizer,
    get_update_step,
    gradient_noise_scale,
    moving_average,
    reported,
    skip_large_updates,
    skip_not_finite,
    skip_spikes,
)
from mtf_gradsync.optimizers.schedules import adafactor_decay_rate_per_update, per_update
from mtf_gradsync.optimizers.slots import check_bare_optimizers
from mtf_gradsync.reduce import (
    FusedAllReduce,
    placement_mesh_impl,
)
from mtf_gradsync.step.plan import StandIn
from mtf_gradsync.step.writes import complete_graph, finish_lowering

# Names that are loaded when they are first used, by a program or in a configuration of gin.
_CONFIGURABLE = {
    "AdamWOptimizer": "mtf_gradsync.optimizers.adamw",
    "ByVariable": "mtf_gradsync.optimizers.by_variable",
    "LowRankAllReduce": "mtf_gradsync.reduce.low_rank",
    "MuonOptimizer": "mtf_gradsync.optimizers.muon",
    "QuantizedAllReduce": "mtf_gradsync.reduce.quantized",
    "is_hidden_matrix": "mtf_gradsync.optimizers.muon",
    "session_config": "mtf_gradsync.runtimes.settings",
}
# Where programs run, and what people do with them, by the names that these rooms have always had.
_ROOMS = {
    "simd": "mtf_gradsync.runtimes.simd",
    "xla": "mtf_gradsync.runtimes.xla",
    "processes": "mtf_gradsync.runtimes.processes",
    "cluster": "mtf_gradsync.runtimes.cluster",
    "train": "mtf_gradsync.tools.train",
    "estimator": "mtf_gradsync.tools.estimator",
    "timelines": "mtf_gradsync.tools.timelines",
    "verification": "mtf_gradsync.tools.verification",
    "planning": "mtf_gradsync.tools.planning",
    "islands": "mtf_gradsync.tools.islands",
}

if TYPE_CHECKING:
    from mtf_gradsync.optimizers import (
        AdamWOptimizer,
        ByVariable,
        MuonOptimizer,
        describe,
        is_hidden_matrix,
    )
    from mtf_gradsync.reduce import LowRankAllReduce, QuantizedAllReduce
    from mtf_gradsync.runtimes import simd as simd
    from mtf_gradsync.runtimes import xla as xla
    from mtf_gradsync.runtimes.checkpoints import adapt_checkpoint
    from mtf_gradsync.runtimes.cluster import Cluster, join_cluster
    from mtf_gradsync.runtimes.copy_checks import CopiesError, watch_copies
    from mtf_gradsync.runtimes.processes.members import LOST_PROCESS_EXIT_CODE, ProcessesError
    from mtf_gradsync.runtimes.savers import ReshardingSaver
    from mtf_gradsync.runtimes.settings import session_config
    from mtf_gradsync.tools import estimator as estimator
    from mtf_gradsync.tools import islands as islands
    from mtf_gradsync.tools.planning.plan import plan
    from mtf_gradsync.tools.timelines import Timeline, TimelineError
    from mtf_gradsync.tools.timelines.timeline import timeline
    from mtf_gradsync.tools.verification.verify import verify
else:  # a type checker that saw `__getattr__` would take any name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "describe": "mtf_gradsync.optimizers.description",
            "ReshardingSaver": "mtf_gradsync.runtimes.savers",
            "adapt_checkpoint": "mtf_gradsync.runtimes.checkpoints",
            "Cluster": "mtf_gradsync.runtimes.cluster",
            "join_cluster": "mtf_gradsync.runtimes.cluster",
            "CopiesError": "mtf_gradsync.runtimes.copy_checks",
            "watch_copies": "mtf_gradsync.runtimes.copy_checks",
            "LOST_PROCESS_EXIT_CODE": "mtf_gradsync.runtimes.processes.members",
            "ProcessesError": "mtf_gradsync.runtimes.processes.members",
            "plan": "mtf_gradsync.tools.planning",
            "Timeline": "mtf_gradsync.tools.timelines",
            "TimelineError": "mtf_gradsync.tools.timelines",
            "timeline": "mtf_gradsync.tools.timelines",
            "verify": "mtf_gradsync.tools.verification",
            **_CONFIGURABLE,
            **_ROOMS,
        },
    )
find_moved({f"{__name__}.{name}": place for name, place in _ROOMS.items()})

patch_libraries()
check_bare_optimizers()
call_around_lowering(complete_graph, finish_lowering)
exclude_from_combining(StandIn)
# What checkpoints of other runs need is loaded when a program restores one, or first trains.
_SAVERS = "mtf_gradsync.runtimes.savers"
patch_when_called(libraries.tf.train.Saver, "restore", f"{_SAVERS}.restore_checked")
patch_when_called(
    libraries.mtf.Lowering, "copy_masters_to_slices", f"{_SAVERS}.copy_masters_to_slices"
)
for _module in checkpoint_initializers():
    patch_when_called(_module, "init_from_checkpoint", f"{_SAVERS}.init_from_checkpoint")

configurable_when_named(
    {
        **_CONFIGURABLE,
        "BestAllReduce": "mtf_gradsync.reduce.choice",
        "CollectiveAllReduce": "mtf_gradsync.reduce.collective",
        "HierarchicalAllReduce": "mtf_gradsync.reduce.hierarchical",
        "SpecBuilder": "mtf_gradsync.tools.estimator.spec_builder",
    }
)
__all__ = [
    "LOST_PROCESS_EXIT_CODE",
    "AdamWOptimizer",
    "AverageOptimizer",
    "ByVariable",
    "ClipByGlobalNormOptimizer",
    "Cluster",
    "CopiesError",
    "CrossShardOptimizer",
    "FusedAllReduce",
    "GradientAccumulationOptimizer",
    "LossScaleOptimizer",
    "LowRankAllReduce",
    "MeshOptimizer",
    "MuonOptimizer",
    "NoUpdateError",
    "OuterOptimizer",
    "ProcessesError",
    "QuantizedAllReduce",
    "ReplicaAxes",
    "ReshardingSaver",
    "ShardedUpdateOptimizer",
    "SyncReplicasOptimizer",
    "Timeline",
    "TimelineError",
    "adafactor_decay_rate_per_update",
    "adapt_checkpoint",
    "clip_by_global_norm",
    "clip_by_shard_norm",
    "describe",
    "get_update_step",
    "gradient_noise_scale",
    "is_hidden_matrix",
    "join_cluster",
    "moving_average",
    "per_shard",
    "per_update",
    "placement_mesh_impl",
    "plan",
    "reduce",
    "reported",
    "session_config",
    "skip_large_updates",
    "skip_not_finite",
    "skip_spikes",
    "sum_shards",
    "timeline",
    "verify",
    "watch_copies",
]
