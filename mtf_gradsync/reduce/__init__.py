"""How gradients cross the mesh: strategies, packing and the sums behind them."""

from mtf_gradsync.reduce.all_reduce import AllReduce
from mtf_gradsync.reduce.fused import FusedAllReduce
from mtf_gradsync.reduce.groups import ProcessorGroups
from mtf_gradsync.reduce.ring import RingAllReduce
from mtf_gradsync.reduce.strategy import Strategy, check_strategy
from mtf_gradsync.reduce.to_one_device import ReductionToOneDevice

__all__ = [
    "AllReduce",
    "FusedAllReduce",
    "ProcessorGroups",
    "ReductionToOneDevice",
    "RingAllReduce",
    "Strategy",
    "check_strategy",
]
