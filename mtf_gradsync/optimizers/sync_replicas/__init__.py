"""Synchronous replicas: an update when enough shards have contributed a fresh gradient."""

from mtf_gradsync.optimizers.skips import NoUpdateError
from mtf_gradsync.optimizers.sync_replicas.optimizer import SyncReplicasOptimizer

__all__ = ["NoUpdateError", "SyncReplicasOptimizer"]
