"""Builds one training step from a stack of wrappers."""

from mtf_gradsync.optimizers.pipeline.builder import Segment, Stage, StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import (
    Form,
    GradientSet,
    Partition,
    Reduced,
    Reduction,
    shard_names,
)
from mtf_gradsync.optimizers.pipeline.order import (
    ONE_FOR_EACH_MESH,
    Traits,
    check_meshes,
    check_order,
    traits_of,
    why_not,
)

__all__ = [
    "ONE_FOR_EACH_MESH",
    "Form",
    "GradientSet",
    "Partition",
    "Reduced",
    "Reduction",
    "Segment",
    "Stage",
    "StepBuilder",
    "Traits",
    "check_meshes",
    "check_order",
    "shard_names",
    "traits_of",
    "why_not",
]
