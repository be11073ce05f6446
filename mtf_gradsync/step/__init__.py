"""The plan of a training step: the order of reads and writes, and work that some steps skip."""

from mtf_gradsync.step.branch import (
    Branch,
    Conditional,
    DeferredUpdate,
    ValuesAfter,
    values_after,
)
from mtf_gradsync.step.outcomes import WATCHED, Watch, Watched, WatchHook
from mtf_gradsync.step.plan import (
    ExtensionLowering,
    PlanExtension,
    StandIn,
    StepPlan,
    resolve_stand_ins,
)
from mtf_gradsync.step.writes import (
    AdvanceStep,
    Gate,
    ProgramWrites,
    WriteInPlace,
    WriteOrder,
    advance_step,
    complete_graph,
    finish_lowering,
    gated_update,
    is_advanced,
    lowerings_of,
    ref_variables_explained,
    write_in_order,
    write_slices,
)

__all__ = [
    "WATCHED",
    "AdvanceStep",
    "Branch",
    "Conditional",
    "DeferredUpdate",
    "ExtensionLowering",
    "Gate",
    "PlanExtension",
    "ProgramWrites",
    "StandIn",
    "StepPlan",
    "ValuesAfter",
    "Watch",
    "WatchHook",
    "Watched",
    "WriteInPlace",
    "WriteOrder",
    "advance_step",
    "complete_graph",
    "finish_lowering",
    "gated_update",
    "is_advanced",
    "lowerings_of",
    "ref_variables_explained",
    "resolve_stand_ins",
    "values_after",
    "write_in_order",
    "write_slices",
]
