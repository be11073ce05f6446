"""Strategies that reduce gradients over the mesh."""

from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.reduce.choice import BestAllReduce, choose_the_best
from mtf_gradsync.reduce.compressed import CompressedAllReduce, GradientStrategy
from mtf_gradsync.reduce.hierarchical import AllReduceSpec, HierarchicalAllReduce
from mtf_gradsync.reduce.low_rank import LowRankAllReduce
from mtf_gradsync.reduce.one_level import (
    AllReduce,
    CollectiveAllReduce,
    FusedAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)
from mtf_gradsync.reduce.placement_mesh import PlacementMeshImpl, placement_mesh_impl
from mtf_gradsync.reduce.quantized import QuantizedAllReduce
from mtf_gradsync.reduce.strategy import (
    Compression,
    GradientOfCores,
    StateMaker,
    Strategy,
    check_strategy,
)

__all__ = [
    "AllReduce",
    "AllReduceSpec",
    "BestAllReduce",
    "CollectiveAllReduce",
    "CompressedAllReduce",
    "Compression",
    "FusedAllReduce",
    "GradientOfCores",
    "GradientStrategy",
    "HierarchicalAllReduce",
    "LowRankAllReduce",
    "PlacementMeshImpl",
    "ProcessorGroups",
    "QuantizedAllReduce",
    "ReductionToOneDevice",
    "RingAllReduce",
    "StateMaker",
    "Strategy",
    "check_strategy",
    "choose_the_best",
    "placement_mesh_impl",
]
