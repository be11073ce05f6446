"""When an inner optimizer's update may run, and how steps are counted."""

from mtf_gradsync.update.conditional import Branch, Conditional
from mtf_gradsync.update.gate import Gate, after, gated_update, settle
from mtf_gradsync.update.reads import ReadOnce, read_variables_once
from mtf_gradsync.update.steps import AdvanceStep, advance_step
from mtf_gradsync.update.warn import reset_warnings, warn_once

__all__ = [
    "AdvanceStep",
    "Branch",
    "Conditional",
    "Gate",
    "ReadOnce",
    "advance_step",
    "after",
    "gated_update",
    "read_variables_once",
    "reset_warnings",
    "settle",
    "warn_once",
]
