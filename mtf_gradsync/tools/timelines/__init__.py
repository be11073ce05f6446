"""Traces and tables of recorded steps, which show where their time goes."""

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
