"""What a recording holds: operations, steps and collectives, with their times."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Literal

from mtf_gradsync.timelines.errors import TimelineError

Kind = Literal["compute", "collective"]

_FORMAT = "mtf_gradsync timeline 1"
# Mesh-TF's name scope of a processor's part of an operation.
_PARALLEL = re.compile(r"(^|/)parallel_\d+(_\d+)*(?=/|$)")


@dataclasses.dataclass(frozen=True)
class Event:
    """One run of an operation on a core.

    Attributes:
      core: the core's number.
      name: of the operation, as the model's graph has it where that is known.
      kind: "compute", or "collective" for what takes values from other cores.
      begin: when it began, in nanoseconds since the epoch.
      end: when it ended.
    """

    core: int
    name: str
    kind: Kind
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """What is known of a collective from the program.

    Attributes:
      bytes_per_core: what a core puts in, or receives on a placement mesh; None where unknown.
      variables: whose values its result becomes part of; None where unknown.
      is_conditional: whether it stands in a branch, as the sums of an update do that is not made
        on every step.
    """

    bytes_per_core: int | None = None
    variables: tuple[str, ...] | None = None
    is_conditional: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """A step, from the end of the one before to its own end.

    Attributes:
      begin: in nanoseconds since the epoch.
      end: likewise.
      is_update: whether it updated the variables; None where that is not known.
    """

    begin: int
    end: int
    is_update: bool | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    """Something that the host did.

    Attributes:
      name: what.
      begin: in nanoseconds since the epoch.
      end: likewise.
    """

    name: str
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Recording:
    """What one process has recorded.

    Attributes:
      runtime: "placement_mesh", "cpu_replicas" or "xla".
      process: the process's number.
      cores: names of its cores by their numbers.
      steps: in order; each begins where the one before ends.
      events: what its cores did.
      collectives: of the program, by the names of their events.
      calls: what its host did.
    """

    runtime: str
    process: int
    cores: dict[int, str]
    steps: tuple[Step, ...]
    events: tuple[Event, ...]
    collectives: dict[str, Collective]
    calls: tuple[Call, ...] = ()

    def to_json(self) -> str:
        """The recording as text, for `from_json` on another machine."""
        content: dict[str, Any] = {"format": _FORMAT}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("steps", "events", "calls"):
                value = [list(dataclasses.astuple(one)) for one in value]
            elif field.name == "collectives":
                value = {name: dataclasses.astuple(one) for name, one in value.items()}
            content[field.name] = value
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Recording:
        """The inverse of `to_json`.

        Raises:
          TimelineError: when it is no such text.
        """
        try:
            content = json.loads(text)
            if content.pop("format") != _FORMAT:
                raise ValueError
            return cls(
                runtime=content["runtime"],
                process=content["process"],
                cores={int(core): name for core, name in content["cores"].items()},
                steps=tuple(Step(*one) for one in content["steps"]),
                events=tuple(Event(*one) for one in content["events"]),
                collectives={
                    name: Collective(size, None if of is None else tuple(of), conditional)
                    for name, (size, of, conditional) in content["collectives"].items()
                },
                calls=tuple(Call(*one) for one in content["calls"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TimelineError(
                "This is no part of a timeline. `mtf-gradsync timeline` writes one in each "
                "process, beside the trace, with .part in its name."
            ) from error


def model_name(name: str) -> str:
    """An operation's name without the processor whose part it is."""
    return _PARALLEL.sub("", name).lstrip("/") or name


def check_recorded(recording: Recording, advice: str) -> Recording:
    """Checks that a recording has operations of every core; an error ends with `advice`."""
    if not recording.steps:
        raise TimelineError(
            "No step was made while the timeline was recorded. Make some inside the `with` block, "
            "by session.run of what trains, after one step before it."
        )
    begin, end = recording.steps[0].begin, recording.steps[-1].end
    seen = {event.core for event in recording.events if begin < event.end and event.begin < end}
    missing = [name for core, name in recording.cores.items() if core not in seen]
    if missing or not recording.cores:
        which = f"of {', '.join(missing[:4])}" if missing else "of a core"
        raise TimelineError(
            f"The profile has no operation {which} in {len(recording.steps)} steps, so nothing can "
            f"be said of where the time goes. {advice}"
        )
    return recording
