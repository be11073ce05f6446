"""Optimizers that wrap Mesh-TF optimizers."""

from typing import TYPE_CHECKING

from mtf_gradsync._private.lazy import lazy_names
from mtf_gradsync.optimizers.accumulation import GradientAccumulationOptimizer
from mtf_gradsync.optimizers.average import AverageOptimizer, moving_average
from mtf_gradsync.optimizers.clip import ClipByGlobalNormOptimizer
from mtf_gradsync.optimizers.cross_shard import CrossShardOptimizer
from mtf_gradsync.optimizers.loss_scale import LossScaleOptimizer
from mtf_gradsync.optimizers.outer import OuterOptimizer
from mtf_gradsync.optimizers.pipeline.forms import Form, PerShard
from mtf_gradsync.optimizers.pipeline.stack import Condition, Stage
from mtf_gradsync.optimizers.pipeline.words import Line
from mtf_gradsync.optimizers.sharded_updates import ShardedUpdateOptimizer
from mtf_gradsync.optimizers.skip_functions import skip_large_updates, skip_not_finite, skip_spikes
from mtf_gradsync.optimizers.skips import NoUpdateError
from mtf_gradsync.optimizers.state import get_update_step, scalar_state
from mtf_gradsync.optimizers.step_reports import (
    NoiseScale,
    gradient_noise_scale,
    reported,
    split_by_shard,
)
from mtf_gradsync.optimizers.sync_replicas import SyncReplicasOptimizer
from mtf_gradsync.optimizers.wrapper import CommonArguments, Wrapper

if TYPE_CHECKING:
    from mtf_gradsync.optimizers.adamw import AdamWOptimizer
    from mtf_gradsync.optimizers.by_variable import ByVariable
    from mtf_gradsync.optimizers.description import DescribedLine, Description, describe
    from mtf_gradsync.optimizers.muon import MuonOptimizer, is_hidden_matrix
else:  # a type checker that saw `__getattr__` would take any name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "AdamWOptimizer": "mtf_gradsync.optimizers.adamw",
            "ByVariable": "mtf_gradsync.optimizers.by_variable",
            "DescribedLine": "mtf_gradsync.optimizers.description",
            "Description": "mtf_gradsync.optimizers.description",
            "MuonOptimizer": "mtf_gradsync.optimizers.muon",
            "describe": "mtf_gradsync.optimizers.description",
            "is_hidden_matrix": "mtf_gradsync.optimizers.muon",
        },
    )

__all__ = [
    "AdamWOptimizer",
    "AverageOptimizer",
    "ByVariable",
    "ClipByGlobalNormOptimizer",
    "CommonArguments",
    "Condition",
    "CrossShardOptimizer",
    "DescribedLine",
    "Description",
    "Form",
    "GradientAccumulationOptimizer",
    "Line",
    "LossScaleOptimizer",
    "MuonOptimizer",
    "NoUpdateError",
    "NoiseScale",
    "OuterOptimizer",
    "PerShard",
    "ShardedUpdateOptimizer",
    "Stage",
    "SyncReplicasOptimizer",
    "Wrapper",
    "describe",
    "get_update_step",
    "gradient_noise_scale",
    "is_hidden_matrix",
    "moving_average",
    "reported",
    "scalar_state",
    "skip_large_updates",
    "skip_not_finite",
    "skip_spikes",
    "split_by_shard",
]
