"""Builds one training step from a stack of wrappers."""

from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet, PerShard, Reduced
from mtf_gradsync.optimizers.pipeline.passes import (
    ONE_FOR_EACH_MESH,
    Traits,
    check_meshes,
    check_order,
    completed,
    traits_of,
    why_not,
)
from mtf_gradsync.optimizers.pipeline.stack import (
    About,
    IslandAxes,
    Line,
    OwnArguments,
    Partition,
    Place,
    Program,
    Reduction,
    Segment,
    Stack,
    Stage,
    nth,
    shard_names,
    told,
)

__all__ = [
    "ONE_FOR_EACH_MESH",
    "About",
    "Form",
    "GradientSet",
    "IslandAxes",
    "Line",
    "OwnArguments",
    "Partition",
    "PerShard",
    "Place",
    "Program",
    "Reduced",
    "Reduction",
    "Segment",
    "Stack",
    "Stage",
    "StepBuilder",
    "Traits",
    "check_meshes",
    "check_order",
    "completed",
    "nth",
    "shard_names",
    "told",
    "traits_of",
    "why_not",
]
