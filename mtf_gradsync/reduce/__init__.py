"""Strategies that reduce gradients over the mesh.

`FusedAllReduce`, the default, and a few others are loaded at once. The module of any other strategy
is loaded when a program, or gin's configuration, names the strategy.
"""

from typing import TYPE_CHECKING

from mtf_gradsync._private.lazy import lazy_names
from mtf_gradsync.mesh.axes import ProcessorGroups
from mtf_gradsync.reduce.compressed import CompressedAllReduce, GradientStrategy
from mtf_gradsync.reduce.one_level import AllReduce, ReductionToOneDevice, RingAllReduce
from mtf_gradsync.reduce.placement_mesh import PlacementMeshImpl, placement_mesh_impl
from mtf_gradsync.reduce.strategy import (
    Compression,
    FusedAllReduce,
    GradientOfCores,
    StateMaker,
    Strategy,
    check_strategy,
)

if TYPE_CHECKING:
    from mtf_gradsync.reduce.choice import BestAllReduce, choose_the_best
    from mtf_gradsync.reduce.collective import CollectiveAllReduce
    from mtf_gradsync.reduce.hierarchical import AllReduceSpec, HierarchicalAllReduce
    from mtf_gradsync.reduce.low_rank import LowRankAllReduce
    from mtf_gradsync.reduce.quantized import QuantizedAllReduce
else:  # a type checker that saw `__getattr__` would take any name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "AllReduceSpec": "mtf_gradsync.reduce.hierarchical",
            "BestAllReduce": "mtf_gradsync.reduce.choice",
            "CollectiveAllReduce": "mtf_gradsync.reduce.collective",
            "HierarchicalAllReduce": "mtf_gradsync.reduce.hierarchical",
            "LowRankAllReduce": "mtf_gradsync.reduce.low_rank",
            "QuantizedAllReduce": "mtf_gradsync.reduce.quantized",
            "choose_the_best": "mtf_gradsync.reduce.choice",
        },
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
