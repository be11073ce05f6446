"""When an inner optimizer's update may run, and how steps are counted."""

from mtf_gradsync._warn import reset_warnings, warn_once
from mtf_gradsync.step.conditional import Branch, Conditional
from mtf_gradsync.step.count import AdvanceStep, advance_step
from mtf_gradsync.step.gate import Gate, after, gated_update, is_ungated, settle
from mtf_gradsync.step.reads import ReadOnce, kept_in_place, read_variables_once
from mtf_gradsync.step.rollback import restored_on_error

__all__ = [
    "AdvanceStep",
    "Branch",
    "Conditional",
    "Gate",
    "ReadOnce",
    "advance_step",
    "after",
    "gated_update",
    "is_ungated",
    "kept_in_place",
    "read_variables_once",
    "reset_warnings",
    "restored_on_error",
    "settle",
    "warn_once",
]
