"""The plan of a training step: the order of reads and writes, and work that some steps skip."""

from mtf_gradsync.step.after import ValuesAfter, values_after
from mtf_gradsync.step.branch import Branch, Conditional
from mtf_gradsync.step.count import AdvanceStep, advance_step, is_advanced
from mtf_gradsync.step.gate import Gate, gated_update
from mtf_gradsync.step.in_place import WriteInPlace
from mtf_gradsync.step.islands import HeldSlices, Islands
from mtf_gradsync.step.later import Later, StandIn, build_later, built
from mtf_gradsync.step.own_writes import OwnWrites
from mtf_gradsync.step.part import Part, PartLowering
from mtf_gradsync.step.plan import Plan
from mtf_gradsync.step.watch import StepWatches, Watch, Watched, WatchHook

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
    "advance_step",
    "build_later",
    "built",
    "gated_update",
    "is_advanced",
    "values_after",
]
