"""Outer steps (DiLoCo): islands of a mesh train separately, synchronized after some updates."""

from mtf_gradsync.optimizers.outer.optimizer import OuterOptimizer

__all__ = ["OuterOptimizer"]
