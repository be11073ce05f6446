"""Sharded updates (ZeRO-1): each replica updates its part of every variable."""

from mtf_gradsync.optimizers.sharded_updates.optimizer import ShardedUpdateOptimizer

__all__ = ["ShardedUpdateOptimizer"]
