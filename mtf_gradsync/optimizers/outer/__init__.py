"""Outer steps: islands of a mesh that train apart and meet after some updates (DiLoCo)."""

from mtf_gradsync.optimizers.outer.optimizer import OuterOptimizer

__all__ = ["OuterOptimizer"]
