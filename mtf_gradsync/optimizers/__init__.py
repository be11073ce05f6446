"""The wrappers: Mesh-TF optimizers around other optimizers."""

from mtf_gradsync.optimizers.cross_shard import CrossShardOptimizer
from mtf_gradsync.optimizers.wrapper import Wrapper

__all__ = ["CrossShardOptimizer", "Wrapper"]
