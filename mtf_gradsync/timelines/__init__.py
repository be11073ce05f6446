"""Where a step's time goes: traces and tables of recorded steps."""

from mtf_gradsync.timelines.events import (
    Call,
    Event,
    RecordedCollective,
    RecordedStep,
    Recording,
    TimelineError,
)
from mtf_gradsync.timelines.table import CollectiveTimes, CoreTimes, OperationTimes, Table
from mtf_gradsync.timelines.timeline import Timeline, Written, timeline

__all__ = [
    "Call",
    "CollectiveTimes",
    "CoreTimes",
    "Event",
    "OperationTimes",
    "RecordedCollective",
    "RecordedStep",
    "Recording",
    "Table",
    "Timeline",
    "TimelineError",
    "Written",
    "timeline",
]
