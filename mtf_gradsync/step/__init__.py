"""The plan of a training step: the order of reads and writes, and work that some steps skip."""

from mtf_gradsync.step.branch import Branch, Conditional
from mtf_gradsync.step.gate import AdvanceStep, Gate, advance_step, gated_update, is_advanced
from mtf_gradsync.step.islands import HeldSlices, Islands
from mtf_gradsync.step.later import Later, StandIn, ValuesAfter, build_later, built, values_after
from mtf_gradsync.step.lowering import Part, PartLowering
from mtf_gradsync.step.plan import Plan
from mtf_gradsync.step.watch import StepWatches, Watch, Watched, WatchHook
from mtf_gradsync.step.writes import (
    OwnWrites,
    WriteInPlace,
    WriteOrder,
    after_lowering,
    before_lowering,
    in_order,
    write_slices,
)

__all__ = [
    "AdvanceStep",
    "Branch",
    "Conditional",
    "Gate",
    "HeldSlices",
    "Islands",
    "Later",
    "OwnWrites",
    "Part",
    "PartLowering",
    "Plan",
    "StandIn",
    "StepWatches",
    "ValuesAfter",
    "Watch",
    "WatchHook",
    "Watched",
    "WriteInPlace",
    "WriteOrder",
    "advance_step",
    "after_lowering",
    "before_lowering",
    "build_later",
    "built",
    "gated_update",
    "in_order",
    "is_advanced",
    "values_after",
    "write_slices",
]
