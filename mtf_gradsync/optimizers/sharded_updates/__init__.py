"""Updates of which each replica makes a part."""

from mtf_gradsync.optimizers.sharded_updates.optimizer import ShardedUpdateOptimizer

__all__ = ["ShardedUpdateOptimizer"]
