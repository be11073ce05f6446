"""Where a step's time goes: traces and tables of recorded steps."""

from mtf_gradsync.tools.timelines.recording import (
    Call,
    Collective,
    Event,
    Recording,
    Step,
    TimelineError,
)
from mtf_gradsync.tools.timelines.table import CollectiveTimes, CoreTimes, OperationTimes, Table
from mtf_gradsync.tools.timelines.timeline import Timeline, Written, timeline

__all__ = [
    "Call",
    "Collective",
    "CollectiveTimes",
    "CoreTimes",
    "Event",
    "OperationTimes",
    "Recording",
    "Step",
    "Table",
    "Timeline",
    "TimelineError",
    "Written",
    "timeline",
]
