"""How gradients cross the mesh: strategies, packing and the sums behind them."""

from mtf_gradsync.reduce.fused import FusedAllReduce
from mtf_gradsync.reduce.groups import ProcessorGroups
from mtf_gradsync.reduce.strategy import Strategy, check_strategy

__all__ = ["FusedAllReduce", "ProcessorGroups", "Strategy", "check_strategy"]
