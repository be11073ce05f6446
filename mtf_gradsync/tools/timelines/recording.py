"""The recording of one process's steps, and functions that the recorders of all runtimes use."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import json
import re
import time
from typing import AbstractSet, Any, Callable, Iterable, Iterator, Literal, Mapping

from mtf_gradsync.extension import STAND_INS, tf


class TimelineError(RuntimeError):
    """The error of steps whose times cannot be found; its message says what to do."""


Kind = Literal["compute", "collective"]
_FORMAT = "mtf_gradsync timeline 1"
# Mesh-TF's name scope of a processor's part of an operation.
_PARALLEL = re.compile(r"(^|/)parallel_\d+(_\d+)*(?=/|$)")


@dataclasses.dataclass(frozen=True)
class Event:
    """A run of an operation on a core.

    Attributes:
      core: the core's number.
      name: the operation's name, in the model's graph if that is known.
      kind: "compute", or "collective" for an operation that takes values from other cores.
      begin: when the run began, in nanoseconds since the epoch.
      end: when the run ended, in nanoseconds since the epoch.
    """

    core: int
    name: str
    kind: Kind
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """The facts about a collective that are known from the program, without a recording.

    Attributes:
      bytes_per_core: bytes that a core gives to the collective (on a placement mesh: bytes that it
        receives); None if unknown.
      variables: the variables into whose values the collective's result goes; None if unknown.
      is_conditional: whether the collective is in a branch. If some steps skip the update, the sums
        of an update are in a branch.
    """

    bytes_per_core: int | None = None
    variables: tuple[str, ...] | None = None
    is_conditional: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """A step and the pause before it: the step begins when the step before it ends.

    Attributes:
      begin: the begin, in nanoseconds since the epoch.
      end: the end, in nanoseconds since the epoch.
      is_update: whether the step updated the variables; None if that is not known.
    """

    begin: int
    end: int
    is_update: bool | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    """A piece of work that the host did during the recording.

    Attributes:
      name: the name of the work, such as "session.run".
      begin: the begin, in nanoseconds since the epoch.
      end: the end, in nanoseconds since the epoch.
    """

    name: str
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Recording:
    """The recording of one process: its steps, and the operations that ran on its cores.

    Attributes:
      runtime: "placement_mesh", "cpu_replicas" or "xla".
      process: the process's number.
      cores: the names of the process's cores, by the cores' numbers.
      steps: the steps, in order; each begins where the step before ends.
      events: the runs of operations on the process's cores.
      collectives: the program's collectives, by the names of their events.
      calls: the work of the process's host.
    """

    runtime: str
    process: int
    cores: dict[int, str]
    steps: tuple[Step, ...]
    events: tuple[Event, ...]
    collectives: dict[str, Collective]
    calls: tuple[Call, ...] = ()

    def to_json(self) -> str:
        """Returns the recording as JSON text, which `from_json` reads on any machine."""
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
        """Returns the recording in a text of `to_json`.

        Raises:
          TimelineError: when `text` was not made by `to_json`.
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
                "This is no part of a timeline. In each process `mtf-gradsync timeline` writes a "
                "file with a part, beside the trace; the file has .part in its name."
            ) from error


def model_name(name: str) -> str:
    """Returns an operation's name in the model, which is the same on all processors.

    `name` is the operation's name in the graph. Parts of `name` that say which processor runs the
    operation are left out of the result.
    """
    return _PARALLEL.sub("", name).lstrip("/") or name


def check_recorded(recording: Recording, advice: str) -> Recording:
    """Returns the recording itself, after a check that it has steps, and operations of each core.

    Raises TimelineError if the recording has no step, or no operation of one of the cores. If
    operations are missing, the error's text ends with `advice`.
    """
    if not recording.steps:
        raise TimelineError(
            "No step was made while the timeline was recorded. Make steps inside the `with` "
            "block, by session.run of the train_op, after one step before the block."
        )
    begin, end = recording.steps[0].begin, recording.steps[-1].end
    seen = {event.core for event in recording.events if begin < event.end and event.begin < end}
    missing = [name for core, name in recording.cores.items() if core not in seen]
    if missing or not recording.cores:
        which = f"of {', '.join(missing[:4])}" if missing else "of a core"
        raise TimelineError(
            f"The profile has no operation {which} in {len(recording.steps)} steps, so it does not "
            f"show where the time goes. {advice}"
        )
    return recording


@contextlib.contextmanager
def method_replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces the method `name` of the object `owner` inside a ``with`` block.

    `make` is a function that takes the old method and returns the new method. The new method may
    call the old one.
    """
    # Not None if another recording has replaced the method, too.
    own = vars(owner).get(name)
    setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def now() -> int:
    """Returns the current time in nanoseconds since the epoch, as profiles count it."""
    return time.time_ns()


def record_call(calls: list[Call], name: str, work: Callable[[], Any]) -> Any:
    """Calls `work` and returns its result; adds a `Call` with this `name` and its times to `calls`.

    The call is added even if `work` raises an exception.
    """
    began = now()
    try:
        return work()
    finally:
        calls.append(Call(name, began, now()))


def steps_until(
    begin: int, ends: Iterable[int], events: Iterable[Event], of_updates: AbstractSet[str]
) -> tuple[Step, ...]:
    """Returns the steps that end at the times `ends`; each begins where the step before ends.

    Args:
      begin: when the first step begins, in nanoseconds since the epoch.
      ends: when each step ends; may be in any order.
      events: the operations that ran.
      of_updates: names of operations that only run in steps with an update. A step in which one of
        them begins has updated the variables. If `of_updates` is empty, it is not known which steps
        have updated the variables, and `is_update` of each returned step is None.
    """
    moments = [begin, *sorted(ends)]
    at = sorted(e.begin for e in events if e.name in of_updates)

    def is_update(first: int, last: int) -> bool | None:
        ran = bisect.bisect_left(at, first) < bisect.bisect_left(at, last)
        return ran if of_updates else None

    return tuple(Step(a, b, is_update(a, b)) for a, b in zip(moments, moments[1:]))


def sums_of_updates(collectives: Mapping[str, Collective], graph: tf.Graph) -> set[str]:
    """Returns the names of the collectives that only steps with an update make.

    A collective is among them if it is in a branch and its result goes into a trained variable. A
    collective whose result goes only into a wrapper's own variables is left out, because a wrapper
    may sum its own variables also in steps without an update. `collectives` has the program's
    collectives by name, and the collections of `graph` tell which variables are trained.
    """
    keys = tf.GraphKeys
    collections = (keys.GLOBAL_VARIABLES, keys.LOCAL_VARIABLES, STAND_INS, keys.TRAINABLE_VARIABLES)
    *all_names, trained = ({v.op.name for v in graph.get_collection(key)} for key in collections)
    others = set().union(*all_names) - trained
    return {
        name
        for name, one in collectives.items()
        if one.is_conditional and set(one.variables or ()) - others
    }
