"""Loss scaling, so that gradients of narrow dtypes neither vanish nor overflow."""

from mtf_gradsync.optimizers.loss_scale.optimizer import LossScaleOptimizer

__all__ = ["LossScaleOptimizer"]
