"""How gradients cross the mesh: strategies, packing and the sums behind them."""

from mtf_gradsync.reduce.all_reduce import AllReduce
from mtf_gradsync.reduce.choice import BestAllReduce, choose_the_best
from mtf_gradsync.reduce.collective import CollectiveAllReduce
from mtf_gradsync.reduce.fused import FusedAllReduce
from mtf_gradsync.reduce.groups import ProcessorGroups
from mtf_gradsync.reduce.hierarchical import AllReduceSpec, HierarchicalAllReduce
from mtf_gradsync.reduce.mesh_impl import PlacementMeshImpl, placement_mesh_impl
from mtf_gradsync.reduce.ring import RingAllReduce
from mtf_gradsync.reduce.strategy import Strategy, check_strategy
from mtf_gradsync.reduce.to_one_device import ReductionToOneDevice
from mtf_gradsync.reduce.wire import CompressedAllReduce

__all__ = [
    "AllReduce",
    "AllReduceSpec",
    "BestAllReduce",
    "CollectiveAllReduce",
    "CompressedAllReduce",
    "FusedAllReduce",
    "HierarchicalAllReduce",
    "PlacementMeshImpl",
    "ProcessorGroups",
    "ReductionToOneDevice",
    "RingAllReduce",
    "Strategy",
    "check_strategy",
    "choose_the_best",
    "placement_mesh_impl",
]
